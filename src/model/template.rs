//! Chat messages to prompt text, by the model's own Jinja template.
//!
//! A template writes control tokens; people do not. Before rendering, every character of a message that a control token
//! could begin with is exchanged for a private-use stand-in, so whatever control token is found in the result was
//! written by the template. The stand-ins are exchanged back afterwards, in text only. This holds for tokens spelled
//! across two messages or parts as well, since such a spelling begins in one of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, ErrorKind, Value};
use serde_json::Value as Json;

use super::pyjson;
use super::tokenizer::ControlTokens;
use crate::limits::{MAX_SMALL_FILE_BYTES, MAX_TEMPLATE_BYTES, MAX_TEMPLATE_STEPS};

/// First of the private-use characters that stand in for the beginnings of control tokens.
const STAND_IN_FIRST: u32 = 0xF_0000;
const NAME: &str = "chat_template";
/// Control tokens by what they are for, as tokenizer_config.json names them and templates know them.
const TOKEN_NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Why a chat cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The model has no template.
    #[error("{} has no chat template (neither chat_template.jinja nor one in tokenizer_config.json)", dir.display())]
    Missing {
        /// The model directory.
        dir: PathBuf,
    },
    /// A file that may hold the template cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A file that may hold the template is not what it should be.
    #[error("{} does not hold a chat template", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        why: super::tokenizer::Why,
    },
    /// The template does not compile.
    #[error("the chat template of {} has an error", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The template engine's report.
        #[source]
        source: minijinja::Error,
    },
    /// The template fails on these messages.
    #[error("the chat template refuses the conversation")]
    Render(#[source] minijinja::Error),
    /// The template makes nothing of the conversation.
    #[error("the chat template of {} gives no text for this conversation", dir.display())]
    Blank {
        /// The model directory.
        dir: PathBuf,
    },
    /// The messages use up every stand-in character.
    #[error("the messages contain too many private-use characters")]
    NoStandIn,
}

impl TemplateError {
    /// What the user can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            TemplateError::Missing { .. } => {
                "copy chat_template.jinja from the model's repository, or continue plain text with --raw"
            }
            TemplateError::Read { source, .. } => match source.kind() {
                std::io::ErrorKind::InvalidData => {
                    "it is not UTF-8 text: copy it from the model's repository again, or continue plain text with --raw"
                }
                std::io::ErrorKind::PermissionDenied => "permission: this user may not read it",
                _ => "copy it from the model's repository again, or continue plain text with --raw",
            },
            TemplateError::Blank { .. } => {
                "the template is empty or not made for this: copy it from the model's repository again, or continue plain \
                 text with --raw"
            }
            TemplateError::Invalid { .. } | TemplateError::Syntax { .. } => {
                "copy that file from the model's repository again, or continue plain text with --raw"
            }
            TemplateError::Render(_) => {
                "the model's template decides what conversations look like; --raw goes without it"
            }
            TemplateError::NoStandIn => "remove the private-use characters (U+F0000 and above)",
        }
    }
}

/// Who says a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions for the whole conversation.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a tool.
    Tool,
}

impl Role {
    /// The name that templates know.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message of `role` with text `content`.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message { role, content: content.into() }
    }
}

/// What a template is told besides the messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RenderOptions {
    /// Whether the model shall think first; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// Whether the rendering ends where the model's answer begins.
    pub add_generation_prompt: bool,
}

/// A piece of a rendered chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The text, or the name of the control token.
    pub text: String,
    /// Whether this is a control token that the template wrote.
    pub control: bool,
}

/// A rendered chat: control tokens, and the text between them as it was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    /// In order. Two text pieces are never adjacent.
    pub pieces: Vec<Piece>,
}

impl Rendered {
    /// The rendering as one string, for people to read: from it alone nobody can tell control tokens from text.
    pub fn text(&self) -> String {
        self.pieces.iter().map(|piece| piece.text.as_str()).collect()
    }
}

/// The chat template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Those of [`TOKEN_NAMES`] that the model has.
    tokens: Vec<(&'static str, String)>,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja` of the model directory `dir`, else the template in `tokenizer_config.json`, which also
    /// says what the template calls `bos_token` and the like.
    pub fn open(dir: &Path) -> Result<ChatTemplate, TemplateError> {
        let config_path = dir.join("tokenizer_config.json");
        let config = match read_optional(&config_path, MAX_SMALL_FILE_BYTES)? {
            Some(json) => parse_config(&json)
                .map_err(|why| TemplateError::Invalid { path: config_path.clone(), why: super::tokenizer::Why(why) })?,
            None => Config::default(),
        };
        let own_path = dir.join("chat_template.jinja");
        let (path, source) = match (read_optional(&own_path, MAX_TEMPLATE_BYTES)?, config.template) {
            (Some(source), _) => (own_path, source),
            (None, Some(source)) => (config_path, source),
            (None, None) => return Err(TemplateError::Missing { dir: dir.to_owned() }),
        };
        let template = ChatTemplate::compile(source).map_err(|source| TemplateError::Syntax { path, source })?;
        Ok(ChatTemplate { tokens: config.tokens, ..template })
    }

    /// Compiles a template from its text.
    pub fn compile(source: String) -> Result<ChatTemplate, minijinja::Error> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_fuel(Some(MAX_TEMPLATE_STEPS));
        environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_filter("tojson", |value: Value, options: Kwargs| -> Result<String, minijinja::Error> {
            let style = pyjson::Style {
                ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
                indent: options.get::<Option<usize>>("indent")?,
                sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
            };
            options.assert_all_used()?;
            pyjson::dump(&value, style)
        });
        environment.add_template_owned(NAME, source)?;
        Ok(ChatTemplate { environment, tokens: Vec::new() })
    }

    /// Renders a conversation. Only what the template itself writes becomes a control token.
    pub fn render(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        control: &ControlTokens,
    ) -> Result<Rendered, TemplateError> {
        let messages = messages
            .iter()
            .map(|m| serde_json::json!({ "role": m.role.name(), "content": m.content }))
            .collect::<Vec<Json>>();
        let tokens = self.tokens.iter().map(|(name, token)| ((*name).to_owned(), token.as_str().into()));
        let mut context: serde_json::Map<String, Json> = tokens.collect();
        context.insert("add_generation_prompt".into(), options.add_generation_prompt.into());
        if let Some(thinking) = options.enable_thinking {
            context.insert("enable_thinking".into(), thinking.into());
        }
        let stand_ins = StandIns::choose(control, &messages).ok_or(TemplateError::NoStandIn)?;
        let hidden = messages.into_iter().map(|mut message| {
            stand_ins.hide_in(&mut message);
            message
        });
        context.insert("messages".into(), hidden.collect());
        let template = self.environment.get_template(NAME).map_err(TemplateError::Render)?;
        let text = template.render(to_value(&Json::Object(context))).map_err(TemplateError::Render)?;

        let mut pieces = control.split(&text);
        for piece in pieces.iter_mut().filter(|piece| !piece.control) {
            piece.text = stand_ins.show(&piece.text);
        }
        Ok(Rendered { pieces })
    }
}

/// A private-use character, absent from the messages, for each character a control token can begin with.
struct StandIns {
    pairs: Vec<(char, char)>,
}

impl StandIns {
    fn choose(control: &ControlTokens, messages: &[Json]) -> Option<StandIns> {
        let mut used = Vec::new();
        for message in messages {
            collect_private(message, &mut used);
        }
        let mut free =
            (STAND_IN_FIRST..STAND_IN_FIRST + 0xFFFE).filter_map(char::from_u32).filter(|c| !used.contains(c));
        let pairs = control.first_chars().into_iter().map(|c| free.next().map(|stand_in| (c, stand_in)));
        Some(StandIns { pairs: pairs.collect::<Option<_>>()? })
    }

    /// Hides every string but the role, which the template compares and does not write.
    fn hide_in(&self, value: &mut Json) {
        match value {
            Json::String(text) => *text = self.exchange(text, |(from, to)| (*from, *to)),
            Json::Array(items) => items.iter_mut().for_each(|item| self.hide_in(item)),
            Json::Object(map) => map.iter_mut().filter(|(key, _)| *key != "role").for_each(|(_, v)| self.hide_in(v)),
            _ => {}
        }
    }

    fn show(&self, text: &str) -> String {
        self.exchange(text, |(from, to)| (*to, *from))
    }

    fn exchange(&self, text: &str, direction: impl Fn(&(char, char)) -> (char, char)) -> String {
        let change = |c: char| self.pairs.iter().map(&direction).find(|(from, _)| *from == c).map_or(c, |(_, to)| to);
        text.chars().map(change).collect()
    }
}

fn collect_private(value: &Json, used: &mut Vec<char>) {
    match value {
        Json::String(text) => {
            for c in text.chars().filter(|c| *c as u32 >= STAND_IN_FIRST) {
                if !used.contains(&c) {
                    used.push(c);
                }
            }
        }
        Json::Array(items) => items.iter().for_each(|item| collect_private(item, used)),
        Json::Object(map) => map.values().for_each(|item| collect_private(item, used)),
        _ => {}
    }
}

fn to_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Value::from(i),
            (None, Some(u)) => Value::from(u),
            (None, None) => Value::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(s) => Value::from(Arc::<str>::from(s.as_str())),
        Json::Array(items) => Value::from(items.iter().map(to_value).collect::<Vec<Value>>()),
        Json::Object(map) => Value::from_pairs(map.iter().map(|(k, v)| (k.as_str(), to_value(v)))),
    }
}

fn read_optional(path: &Path, bytes_max: u64) -> Result<Option<String>, TemplateError> {
    let read = || -> std::io::Result<Option<String>> {
        let length = match std::fs::metadata(path) {
            // Opening a pipe would wait for a writer.
            Ok(meta) if !meta.is_file() => return Err(std::io::Error::other("it is no regular file")),
            Ok(meta) => meta.len(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        if length > bytes_max {
            return Err(std::io::Error::other(format!("{length} bytes are more than the {bytes_max} it may have")));
        }
        std::fs::read_to_string(path).map(Some)
    };
    read().map_err(|source| TemplateError::Read { path: path.to_owned(), source })
}

/// What tokenizer_config.json says that a template needs.
#[derive(Default)]
struct Config {
    template: Option<String>,
    tokens: Vec<(&'static str, String)>,
}

/// `chat_template` is a string, or a list of named templates of which "default" counts; a token is a string, or an object
/// with the string in it.
fn parse_config(json: &str) -> Result<Config, String> {
    let config: Json = serde_json::from_str(json).map_err(|e| e.to_string())?;
    let template = match config.get("chat_template") {
        None | Some(Json::Null) => None,
        Some(Json::String(source)) => Some(source.clone()),
        Some(Json::Array(named)) => {
            let default = named.iter().find(|t| t.get("name").and_then(Json::as_str) == Some("default"));
            match default.and_then(|t| t.get("template")).and_then(Json::as_str) {
                Some(source) => Some(source.to_owned()),
                None => return Err("chat_template lists no template named \"default\"".into()),
            }
        }
        Some(_) => return Err("chat_template is neither a string nor a list".into()),
    };
    let token = |name: &'static str| {
        let value = config.get(name)?;
        let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
        Some((name, text.to_owned()))
    };
    Ok(Config { template, tokens: TOKEN_NAMES.into_iter().filter_map(token).collect() })
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
