//! Files of conversations: those that were named, and that which goes with the file of a context.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::cli::{Failure, output};
use crate::limits::MAX_PROMPT_BYTES;
use crate::model::conversation::Conversation;
use crate::model::tokenizer::Tokenizer;

/// Where a conversation is kept from turn to turn.
pub struct Kept {
    path: PathBuf,
}

impl Kept {
    /// That which goes with the context in the file at `kv`, and what is there of it. What is wrong, where it cannot be kept:
    /// something else has its name.
    pub fn open(kv: &Path, tokenizer: &Tokenizer) -> Result<(Kept, Option<Conversation>), String> {
        let mut name = OsString::from(kv);
        name.push(".json");
        let path = PathBuf::from(name);
        match read(&path, tokenizer) {
            Ok(conversation) => Ok((Kept { path }, conversation)),
            Err(why) => Err(format!("{} is left as it is, and the conversation is not kept: {why}", path.display())),
        }
    }

    /// Puts `conversation` in the place of what was there.
    pub fn save(&self, conversation: &Conversation, tokenizer: &Tokenizer) -> io::Result<()> {
        output::replace_private(&self.path, conversation.to_json(tokenizer).as_bytes())
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Writes a conversation to a file that was named: a new one, or one that holds another conversation.
pub fn save(
    path: &Path,
    inputs: &[PathBuf],
    conversation: &Conversation,
    tokenizer: &Tokenizer,
) -> Result<(), Failure> {
    output::check(path, "conversation", inputs)?;
    if fs::metadata(path).is_ok_and(|there| there.is_file() && there.len() > 0)
        && let Err(why) = read(path, tokenizer)
    {
        return Err(Failure::usage(format!("{} holds no conversation, and is left as it is", path.display()))
            .cause(why)
            .hint("give another name"));
    }
    output::replace_private(path, conversation.to_json(tokenizer).as_bytes())
        .map_err(|e| Failure::work(format!("cannot write the conversation to {}", path.display())).cause(e))
}

/// The conversation in a file that was named.
pub fn load(path: &Path, tokenizer: &Tokenizer) -> Result<Conversation, Failure> {
    let refused = |cause: String| Failure::usage(format!("cannot load {}", path.display())).cause(cause);
    let found = read(path, tokenizer).map_err(|why| {
        refused(why).hint("/load reads what /save writes, or a list of messages with `role` and `content` as JSON")
    })?;
    found.ok_or_else(|| refused("it does not exist".to_owned()))
}

/// The conversation in a file, if there is a file.
fn read(path: &Path, tokenizer: &Tokenizer) -> Result<Option<Conversation>, String> {
    let read = || {
        // Opening a pipe would wait for a writer.
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::other("it is no regular file"));
        }
        let mut text = String::new();
        let bytes = File::open(path)?.take(MAX_PROMPT_BYTES).read_to_string(&mut text)?;
        match bytes as u64 {
            MAX_PROMPT_BYTES => Err(io::Error::other("it is too long")),
            _ => Ok(text),
        }
    };
    match read() {
        Ok(text) => Conversation::from_json(&text, tokenizer).map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}
