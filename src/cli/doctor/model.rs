//! Checks of the directory: everything that is settled before a weight is read.

use std::path::Path;

use crate::checkpoint::{self, Arch, Checkpoint, CheckpointError, TensorMap};
use crate::kernels::Format;
use crate::model::template::{ChatTemplate, Message, RenderOptions, Role, TemplateError};
use crate::model::tokenizer::Tokenizer;

use super::Report;
use crate::cli::prompt::beyond_vocabulary;
use crate::cli::{Failure, size};

/// The model and the tokens of a greeting, where nothing about its files is wrong but perhaps its tokenizer, without
/// which `run --ids` works.
pub fn examine(dir: &Path, report: &mut Report) -> Option<(Checkpoint, usize)> {
    // What is being written has no small files yet, and none is to be put there.
    if let Err(error @ CheckpointError::Unfinished { .. }) = checkpoint::refuse_partial(dir) {
        report.failure("shards", failure(&error));
        report.skip("config", "comes when the last shard is written, with the tokenizer", None);
        return None;
    }
    let arch = checkpoint::read_arch(dir).map_err(|error| report.failure("config", failure(&error))).ok();
    if let Some(arch) = &arch {
        let (layers, moe) = (arch.layers.len(), &arch.moe);
        let experts = format!("{} of {} experts a token", moe.top_k, moe.experts);
        let family = arch.family.name();
        report.ok("config", format!("{family}, {layers} layers, {experts}, up to {} positions", arch.max_context));
    }
    let tokenizer = tokenizer(dir, arch.as_ref(), report);
    let greeting = template(dir, arch.as_ref(), tokenizer.as_ref(), report);
    if let Some(arch) = &arch {
        stop_tokens(dir, arch, tokenizer.as_ref(), report);
    }
    let whole = shards(dir, report);
    if !whole || arch.is_none() {
        report.skip("tensors", "needs config.json and every header", None);
        return None;
    }
    let checkpoint = Checkpoint::open_without_tokenizer(dir);
    let checkpoint = checkpoint.map_err(|error| report.failure("tensors", failure(&error))).ok()?;
    let experts = checkpoint.experts.layers.iter().flatten().map(Vec::len).sum::<usize>();
    report.ok("tensors", format!("everything an answer needs, {experts} experts included"));
    for note in checkpoint.notes() {
        report.warn("notes", note, "the model runs without; fetch it again if it should be there");
    }
    mtp(&checkpoint, report);
    Some((checkpoint, greeting.unwrap_or(1)))
}

fn failure(error: &CheckpointError) -> Failure {
    Failure::of(error).hint(error.hint())
}

fn tokenizer(dir: &Path, arch: Option<&Arch>, report: &mut Report) -> Option<Tokenizer> {
    let opened = Tokenizer::open(dir);
    let tokenizer = opened.map_err(|e| report.failure("tokenizer", Failure::of(&e).hint(e.hint()))).ok()?;
    match arch.and_then(|arch| beyond_vocabulary(dir, &tokenizer, arch)) {
        Some(beyond) => report.failure("tokenizer", beyond),
        None => report.ok("tokenizer", format!("{} tokens", tokenizer.vocab_size())),
    }
    Some(tokenizer)
}

/// Returns how many tokens a greeting has.
fn template(dir: &Path, arch: Option<&Arch>, tokenizer: Option<&Tokenizer>, report: &mut Report) -> Option<usize> {
    let Some(tokenizer) = tokenizer else {
        report.skip("template", "needs the tokenizer", None);
        return None;
    };
    let options = RenderOptions { enable_thinking: Some(false), add_generation_prompt: true };
    let rendered = ChatTemplate::open(dir)
        .and_then(|template| template.render(&[Message::new(Role::User, "Hello")], &options, tokenizer.control()))
        .and_then(|rendered| match rendered.text().trim() {
            "" => Err(TemplateError::Blank { dir: dir.to_owned() }),
            _ => Ok(rendered),
        });
    match rendered {
        Ok(rendered) => match tokenizer.encode_rendered(&rendered) {
            Ok(ids) if ids.iter().any(|&id| arch.is_some_and(|arch| id as usize >= arch.vocab)) => report.fail(
                "template",
                "a greeting needs tokens beyond the model's vocabulary",
                Some("tokenizer.json and config.json belong to different models: fetch both again".to_owned()),
            ),
            Ok(ids) => {
                report.ok("template", format!("a greeting becomes {} tokens", ids.len()));
                return Some(ids.len());
            }
            Err(e) => report.failure("template", Failure::of(&e).hint(e.hint())),
        },
        Err(e @ TemplateError::Missing { .. }) => report.warn("template", e.to_string(), e.hint()),
        Err(e) => report.failure("template", Failure::of(&e).hint(e.hint())),
    }
    None
}

fn stop_tokens(dir: &Path, arch: &Arch, tokenizer: Option<&Tokenizer>, report: &mut Report) {
    let sources = match checkpoint::stop_sources(dir, arch) {
        Ok(sources) => sources,
        Err(error) => return report.failure("stop-tokens", failure(&error)),
    };
    let named = |id: u32| {
        let name = tokenizer.and_then(|tokenizer| tokenizer.control().name(id));
        name.map_or_else(|| id.to_string(), |name| format!("{id} {name}"))
    };
    let texts = sources.iter().filter(|(_, ids)| !ids.is_empty()).map(|(file, ids)| {
        let ids: Vec<String> = ids.iter().map(|&id| named(id)).collect();
        format!("{} from {file}", ids.join(", "))
    });
    let text = texts.collect::<Vec<_>>().join("; ");
    if text.is_empty() {
        let hint = "copy generation_config.json from the model's repository, or end answers with --stop";
        report.warn("stop-tokens", "none: answers end by their length only", hint);
    } else {
        report.ok("stop-tokens", text);
    }
}

/// Completeness and headers; `true` where both are well.
fn shards(dir: &Path, report: &mut Report) -> bool {
    let opened = checkpoint::refuse_partial(dir).and_then(|()| TensorMap::open(dir));
    let map = match opened {
        Ok(map) => map,
        Err(error @ CheckpointError::Header { .. }) => {
            // A shard that was put right in between was wrong all the same.
            let all = checkpoint::bad_headers(dir).unwrap_or_default();
            let all = if all.is_empty() { vec![error] } else { all };
            all.iter().for_each(|fault| report.failure("headers", failure(fault)));
            return false;
        }
        Err(error @ (CheckpointError::Duplicate { .. } | CheckpointError::IndexDiffers { .. })) => {
            report.failure("headers", failure(&error));
            return false;
        }
        Err(error) => {
            report.failure("shards", failure(&error));
            return false;
        }
    };
    report.ok("shards", format!("{} shards, {}", map.paths().len(), size::show(map.file_bytes())));
    report.ok("headers", format!("{} tensors, each in its place", map.len()));
    true
}

/// The width of the layer that drafts: below 8 bits its drafts are seldom accepted.
fn mtp(checkpoint: &Checkpoint, report: &mut Report) {
    if checkpoint.arch.mtp.is_none() {
        return report.skip("mtp", "the model has no MTP layer", None);
    }
    let text = checkpoint.mtp_formats().iter().map(Format::to_string).collect::<Vec<_>>().join(", ");
    if checkpoint.narrow_mtp().is_some() {
        report.warn("mtp", format!("{text}: drafts of a narrow layer are seldom right"), "convert with --mtp 8");
    } else {
        report.ok("mtp", text);
    }
}
