//! The prompt: from where it is typed to token ids.

use std::io::{IsTerminal, Read};
use std::path::Path;

use crate::checkpoint::Arch;
use crate::limits::MAX_PROMPT_BYTES;
use crate::model::template::{ChatTemplate, Message, RenderOptions, Role, TemplateError};
use crate::model::tokenizer::{Tokenizer, TokenizerError};

use super::args::RunArgs;
use super::{Failure, render};

/// The prompt as text, from wherever the flags say.
pub fn read_prompt(args: &RunArgs) -> Result<String, Failure> {
    let read = |source: &mut dyn Read, name: &str| {
        let mut bytes = Vec::new();
        let cannot = |cause: String| Failure::usage(format!("cannot read the prompt from {name}")).cause(cause);
        source.take(MAX_PROMPT_BYTES + 1).read_to_end(&mut bytes).map_err(|e| cannot(e.to_string()))?;
        if bytes.len() as u64 > MAX_PROMPT_BYTES {
            return Err(cannot(format!("it is longer than {MAX_PROMPT_BYTES} bytes")));
        }
        let mut text = String::from_utf8(bytes).map_err(|e| cannot(format!("it is not UTF-8: {e}")))?;
        // Files and pipes end in a newline that nobody means.
        if text.ends_with('\n') {
            text.truncate(text.len() - if text.ends_with("\r\n") { 2 } else { 1 });
        }
        Ok(text)
    };
    let mut stdin = std::io::stdin();
    let text = match (&args.prompt, &args.file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) if path != Path::new("-") => {
            let name = path.display().to_string();
            let mut file = std::fs::File::open(path)
                .map_err(|e| Failure::usage(format!("cannot read the prompt from {name}")).cause(e))?;
            read(&mut file, &name)?
        }
        (None, None) if stdin.is_terminal() => {
            return Err(Failure::usage("there is no prompt").hint("give one with -p TEXT or -f FILE, or pipe it in"));
        }
        _ => read(&mut stdin, "standard input")?,
    };
    if text.is_empty() {
        return Err(Failure::usage("the prompt is empty").hint("give one with -p TEXT or -f FILE, or pipe it in"));
    }
    Ok(text)
}

/// A text that is put through the model as it is; - is standard input.
pub fn read_text(path: &Path) -> Result<String, Failure> {
    let cannot = |cause: String| Failure::usage(format!("cannot read the text {}", path.display())).cause(cause);
    let mut bytes = Vec::new();
    let read = |source: &mut dyn Read, bytes: &mut Vec<u8>| source.take(MAX_PROMPT_BYTES + 1).read_to_end(bytes);
    let length = if path == Path::new("-") {
        read(&mut std::io::stdin(), &mut bytes)
    } else {
        std::fs::File::open(path).and_then(|mut file| read(&mut file, &mut bytes))
    };
    if length.map_err(|e| cannot(e.to_string()))? as u64 > MAX_PROMPT_BYTES {
        return Err(cannot(format!("it is longer than {MAX_PROMPT_BYTES} bytes")));
    }
    String::from_utf8(bytes).map_err(|e| cannot(format!("it is not UTF-8: {e}")))
}

/// Token ids from a prompt that lists them.
pub fn parse_ids(text: &str) -> Result<Vec<u32>, Failure> {
    let words = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty());
    let ids: Vec<u32> = words
        .map(|word| {
            word.parse().map_err(|_| {
                Failure::usage(format!("{word:?} in the prompt is not a token id"))
                    .hint("with --ids the prompt is numbers with commas or blanks between them")
            })
        })
        .collect::<Result<_, _>>()?;
    if ids.is_empty() {
        return Err(Failure::usage("the prompt holds no token id").hint("write it as in --ids -p \"17, 4 256\""));
    }
    Ok(ids)
}

/// Refuses ids that the model has no embedding for.
pub fn check_ids(ids: Vec<u32>, arch: &Arch) -> Result<Vec<u32>, Failure> {
    match ids.iter().find(|id| **id as usize >= arch.vocab) {
        None => Ok(ids),
        Some(id) => {
            Err(Failure::usage(format!("token id {id} in the prompt is beyond the vocabulary of {}", arch.vocab))
                .hint("the ids belong to another model, or one has a digit too many"))
        }
    }
}

/// Why a tokenizer that has ids beyond the vocabulary of the model in `dir` is not its own.
pub fn beyond_vocabulary(dir: &Path, tokenizer: &Tokenizer, arch: &Arch) -> Option<Failure> {
    let (files, size) = ([dir.join("tokenizer.json"), dir.join("config.json")], tokenizer.vocab_size());
    let [tokens, config] = files.each_ref().map(|file| file.display());
    (size > arch.vocab).then(|| {
        Failure::work(format!("{tokens} has token ids up to {}, and {config} a vocab_size of {}", size - 1, arch.vocab))
            .hint("the two files belong to different models: fetch both from the same place, or give token ids with --ids")
    })
}

/// The tokenizer of the model in `dir`. With `optional` it may be missing, and then has no say.
pub fn open_tokenizer(dir: &Path, arch: &Arch, optional: bool) -> Result<Option<Tokenizer>, Failure> {
    match Tokenizer::open(dir) {
        Ok(tokenizer) => match beyond_vocabulary(dir, &tokenizer, arch) {
            Some(failure) if !optional => Err(failure),
            _ => Ok(Some(tokenizer)),
        },
        Err(TokenizerError::Missing { .. }) if optional => Ok(None),
        Err(error) => Err(tokenizer_failure(&error)),
    }
}

/// A failure of the tokenizer, with its hint.
pub fn tokenizer_failure(error: &TokenizerError) -> Failure {
    Failure::of(error).hint(error.hint())
}

/// Token ids of a prompt in words, inside the model's chat template unless it is raw.
pub fn encode(args: &RunArgs, dir: &Path, tokenizer: &Tokenizer, prompt: &str) -> Result<Vec<u32>, Failure> {
    if args.raw {
        return tokenizer.encode_raw(prompt).map_err(|e| tokenizer_failure(&e));
    }
    let refused = |e: TemplateError| Failure::of(&e).hint(e.hint());
    let template = ChatTemplate::open(dir).map_err(refused)?;
    let system = args.system.as_ref().map(|text| Message::new(Role::System, text));
    let messages: Vec<Message> = system.into_iter().chain([Message::new(Role::User, prompt)]).collect();
    let options = RenderOptions { enable_thinking: Some(false), add_generation_prompt: true };
    let rendered = template.render(&messages, &options, tokenizer.control()).map_err(refused)?;
    let text = rendered.text();
    if text.trim().is_empty() {
        return Err(refused(TemplateError::Blank { dir: dir.to_owned() }));
    }
    // A template may trim what is said; that it leaves it out is worth a word.
    if !text.contains(prompt.trim()) {
        render::note(
            args.quiet,
            "what the model's chat template makes of the prompt does not contain the prompt as it is",
        );
    }
    tokenizer.encode_rendered(&rendered).map_err(|e| tokenizer_failure(&e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_ids_are_read_with_commas_or_blanks() {
        assert_eq!(parse_ids(" 1, 2,3\n4\t5 ").unwrap(), [1, 2, 3, 4, 5]);
        assert!(parse_ids("1 x").unwrap_err().error.contains("\"x\""));
        assert!(parse_ids("1 -2").unwrap_err().error.contains("\"-2\""));
        assert!(parse_ids("4294967296").is_err());
        assert!(parse_ids(" , ").unwrap_err().error.contains("no token id"));
    }
}
