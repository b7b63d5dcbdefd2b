//! What to do about an error: one line for each, in the words of whoever meets it.

use super::error::{CheckpointError, Way};
use millstream_io::IoError;
use std::io;

/// What to do about a shard of a container that is not there.
const MADE_AGAIN: &str = "run the conversion that made the container again: it makes the shards that are missing, of a source that has what they were made from (fetch again what --delete-source removed); or fetch them where the container was fetched";
/// And about one of another checkpoint.
const FETCHED: &str = "fetch the missing shards; where `synth` made the model, make it again";

impl CheckpointError {
    /// One line on what to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            CheckpointError::Io { action, source, .. } => io_hint(action, source.kind()),
            CheckpointError::SmallFilesMissing { shards: 0, .. } | CheckpointError::NoShards { .. } => {
                "give the directory that holds the *.safetensors files of the model"
            }
            CheckpointError::SmallFilesMissing { .. } => {
                "copy the small JSON files of the same checkpoint beside the shards; where a conversion made these, the same command puts them back"
            }
            CheckpointError::Unfinished { .. } => "run the command that wrote it again: it continues where it stopped",
            CheckpointError::Config { field, found, .. } => config_hint(field, found),
            CheckpointError::Header { file, .. } if is_made_here(&file.to_string_lossy()) => {
                "the shard is damaged or incomplete: remove it and run the conversion that made it again, which makes what is missing; or fetch it again where the container was fetched"
            }
            CheckpointError::Header { .. } => {
                "the shard is damaged or incomplete: fetch it again and compare its checksum; where `synth` made the model, remove it and make the model again"
            }
            CheckpointError::Duplicate { .. } => {
                "two checkpoints are mixed in one directory: move the shards that do not belong"
            }
            CheckpointError::ShardsMissing { missing, .. } if missing.iter().all(|shard| is_made_here(shard)) => {
                MADE_AGAIN
            }
            CheckpointError::ShardsMissing { .. } => FETCHED,
            CheckpointError::IndexDiffers { .. } => {
                "shard and index come from different uploads: fetch both again, or remove the index if the shards are right"
            }
            CheckpointError::TensorMissing { absent, .. }
                if !absent.is_empty() && absent.iter().all(|shard| is_made_here(shard)) =>
            {
                "run the conversion that made the container again, where it made shards of these numbers; if it did not, config.json belongs to another model"
            }
            CheckpointError::TensorMissing { absent, .. } if !absent.is_empty() => {
                "fetch the missing shards, or where `synth` made the model, make it again; if there are none, config.json belongs to another model"
            }
            CheckpointError::TensorMissing { .. } => "a shard is missing, or config.json belongs to another model",
            CheckpointError::Tensor { what: "format", .. } => {
                "config.json, the map colibri.fmt in the shard's metadata and the tensor's sizes do not agree: fetch config.json and the shard again, or take the entry out of the map if the sizes are right"
            }
            CheckpointError::Tensor { .. } => {
                "config.json and shards belong to different models, or the shard is damaged"
            }
            CheckpointError::ScaleMissing { .. } => {
                "fetch the shard that holds the scales; raw codes without scales are never used as weights"
            }
            CheckpointError::OnlySource { .. } => "make a container of it with millstream convert, and run that",
            CheckpointError::Spoilt(_) => {
                "the source is damaged: fetch it again, or make it again where `synth` did; nothing is made of what no model could run with, and nothing was removed for this shard"
            }
            CheckpointError::NotFinite { .. } => {
                "the source shard is damaged: fetch it again, or make it again where `synth` did; a publisher's own weight of 1024 or more is beyond what stays finite here"
            }
            CheckpointError::Quantized { .. } => {
                "give --repack to keep every weight and change only the layout, or convert the checkpoint that this was made from"
            }
            CheckpointError::ConvertOptions { .. } | CheckpointError::SynthOptions { .. } => {
                "change the option named above"
            }
            CheckpointError::ConvertDiffers { way: Way::Keep, .. } => {
                "shards of the source were removed as they were converted: keep this directory, it may be the only copy of the model; give the parameters it was made with"
            }
            CheckpointError::ConvertDiffers { way: Way::Check, .. } => {
                "a check needs the flags and the source that the container was made with: give those that are there"
            }
            CheckpointError::ConvertDiffers { finished: true, .. } => {
                "give another destination, or, where its own source is still whole, remove this one"
            }
            CheckpointError::ConvertDiffers { .. } => {
                "give the parameters it was begun with to continue it, or another destination"
            }
            CheckpointError::Consumed { .. } => {
                "give the directory that it was converted into; if that is not finished, the same conversion continues; where the whole model was fetched again, remove .millstream-consumed.json"
            }
            CheckpointError::SourceGone { is_here: true, .. } => {
                "fetch again what is gone, into the directory that it was removed from, and give the same command: nothing else makes this shard again"
            }
            CheckpointError::SourceGone { .. } => {
                "continue the conversion that removed them, into its own destination; or fetch again what is gone"
            }
            CheckpointError::SourceKept { source, .. } if is_full(source.kind()) => {
                "leave --delete-source out, or free some space there: what the shards were is recorded before they go"
            }
            CheckpointError::SourceKept { source, .. } if is_forbidden(source.kind()) => {
                "leave --delete-source out, or make the directory writable for this user"
            }
            CheckpointError::SourceKept { .. } => {
                "check the drive's health (dmesg); the same command continues, without --delete-source too"
            }
            CheckpointError::Interrupted { .. } => "the same command continues",
            CheckpointError::ConvertBusy { .. } => "wait for it to end, or give another destination",
            CheckpointError::SourceBusy { .. } => "wait for it to end: what it makes is the model then",
            CheckpointError::ConvertOccupied { .. } => "give an empty or new directory",
            CheckpointError::Device(IoError::Memory { .. }) => "free memory, or allow this process more of it",
            CheckpointError::Device(IoError::Changed { .. }) => {
                "somebody writes into the source: let that end, then run the same command again"
            }
            CheckpointError::Device(_) => "check the drive's health (dmesg); the same command continues",
            CheckpointError::Damaged { gone, .. } if gone.is_empty() => {
                "if it was made by this conversion, remove it and convert again with the same flags, which makes it anew; check the drive's health (dmesg)"
            }
            CheckpointError::Damaged { .. } => {
                "put a whole copy of the damaged shard in its place; or fetch again what it was made from, remove the damaged shard, and convert again with the same flags; check the drive's health (dmesg)"
            }
            CheckpointError::Record { .. } => {
                "it told what the removed shards were: put a whole copy in its place, or fetch those shards again and remove it; then the same conversion goes on"
            }
            CheckpointError::ReadBack { .. } => {
                "the drive or the memory is at fault (dmesg): nothing of this shard was kept; the same command writes it again"
            }
            CheckpointError::SourceDamaged { is_whole: true, .. } => {
                "nothing was made of it, and nothing removed: `millstream doctor --deep -m DIR` lists all that is damaged; convert or fetch the model again"
            }
            CheckpointError::SourceDamaged { .. } => {
                "nothing was made of it, and shards before it are gone: put a right copy of each shard that is named in its place, then run the same command again, which goes on"
            }
            CheckpointError::OtherWeights { .. } => {
                "it was made from another model with the same headers: give another destination; nothing was removed for this shard"
            }
            CheckpointError::SelfTest { .. } => {
                "nothing was converted: the processor or this build of the program is at fault"
            }
            CheckpointError::NoSpace { .. } => "free space, or give a destination on a larger drive",
        }
    }
}

/// Whether a shard has a name that conversions give.
fn is_made_here(shard: &str) -> bool {
    shard.rsplit('/').next().is_some_and(|name| name.starts_with("out-"))
}

/// Whether nothing may be written there.
fn is_forbidden(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

/// Whether there was no room.
fn is_full(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// What to do about a refusal of the system. `action` is a verb.
pub(crate) fn io_hint(action: &str, kind: io::ErrorKind) -> &'static str {
    use io::ErrorKind::{
        AlreadyExists, FileTooLarge, NotADirectory, NotFound, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem,
    };
    let writes = ["create", "write", "rename", "sync", "remove", "lock"].contains(&action);
    match kind {
        QuotaExceeded => {
            "this user's quota is used up: free space of theirs, or have it raised, and run the same command again"
        }
        _ if is_full(kind) => "free space and run the same command again",
        FileTooLarge => {
            "files may be no larger: raise `ulimit -f`, or give a destination on a file system that takes larger ones"
        }
        ReadOnlyFilesystem => "the file system is mounted read-only: give another destination",
        PermissionDenied if writes => {
            "permission: this user may not write there; give another destination, or change who may"
        }
        PermissionDenied => "permission: this user may not read it, or not enter a directory above it",
        AlreadyExists | NotADirectory => "a file is where a directory should be: check the path",
        NotFound if writes => "check the path of the destination",
        NotFound => "check the path; in a download cache a dangling link means the file was never fetched",
        _ if writes => "check the drive that is written to (dmesg)",
        _ => "check the drive's health (dmesg)",
    }
}

/// What to do about a small file: fetch it again where it is damaged, and never where it is right but unsupported.
fn config_hint(field: &str, found: &str) -> &'static str {
    const VARIANT: [&str; 7] = [
        "scoring_func",
        "topk_method",
        "hidden_act",
        "attention_bias",
        "moe_layer_freq",
        "rope_interleave",
        "indexer_rope_interleave",
    ];
    const ROPE: [&str; 5] = ["rope_type", "type", "partial_rotary_factor", "factor", "attention_factor"];
    let last = field.rsplit('.').next().unwrap_or(field);
    if ["JSON", "weight_map", "length"].contains(&field) {
        "the file is damaged or cut short: fetch it again"
    } else if field == "kind of file" {
        "put the file of the model's publisher, or a link to it, in its place"
    } else if found == "nothing" {
        "the file lacks a value that decides what the model is: compare it with the one of the model's publisher"
    } else if field == "model_type" {
        "models of this type are not supported: only those of type glm_moe_dsa and olmoe are"
    } else if field.starts_with("quantization_config.") {
        "this quantization is not supported: only FP8 (e4m3) in blocks of 128 by 128, NVFP4 of modelopt, and none, are"
    } else if field.starts_with("rope_") && ROPE.contains(&last) {
        "this kind of rotary position embedding is not supported: only the default, without scaling, is"
    } else if VARIANT.contains(&field) {
        "this variant of the architecture is not supported"
    } else {
        "the value is damaged, or outside what this release supports: compare it with the one of the model's publisher"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_that_a_conversion_makes_is_not_to_be_downloaded() {
        let of =
            |shard: &str| CheckpointError::ShardsMissing { index: "m".into(), missing: vec![shard.to_owned()] }.hint();
        assert!(of("out-00003.safetensors").starts_with("run the conversion"));
        assert!(of("model-00003-of-00004.safetensors").starts_with("fetch the missing shards"));
    }

    #[test]
    fn every_way_in_which_a_drive_takes_no_more_has_a_hint_of_its_own() {
        // Numbers of asm-generic/errno.h: EFBIG, EDQUOT, EROFS, ENOSPC, EIO.
        for (errno, words) in
            [(27, "ulimit -f"), (122, "quota"), (30, "read-only"), (28, "free space"), (5, "check the drive")]
        {
            let hint = io_hint("write", io::Error::from_raw_os_error(errno).kind());
            assert!(hint.contains(words), "{errno}: {hint}");
            assert!(errno == 5 || !hint.contains("dmesg"), "{errno}: {hint}");
        }
    }
}
