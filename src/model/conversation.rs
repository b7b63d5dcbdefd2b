//! A conversation: what was said, and the tokens that the model read and wrote of it.
//!
//! **What was read stays read.** The prompt of a turn is the tokens of all turns before it, as they went through the model, and
//! behind them what the chat template writes after an answer: the user's words, and where the next answer begins. To find that,
//! the whole conversation is rendered with a stand-in for the last answer. So nothing of an answer is cut into tokens a second
//! time (which may give others), what the model thought stays where it thought it, and whoever holds the context of the turns
//! before computes only what is new.
//!
//! Where those tokens are not known (another model's conversation, or one that was written by hand), all of it is rendered as it
//! is, and read again once.

use serde_json::{Value as Json, json};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::template::{ChatTemplate, Message, RenderOptions, Rendered, Role, TemplateError};
use super::tokenizer::{ControlTokens, Tokenizer, TokenizerError};

/// The last of the private-use characters: the first that may stand in for an answer.
const STAND_IN_LAST: u32 = 0x10_FFFD;
/// What a file of a conversation says that it is.
const FORMAT: &str = "millstream-conversation";
/// The version of its field names.
const SCHEMA_VERSION: u64 = 1;

/// Why a turn has no prompt.
#[derive(Debug, thiserror::Error)]
pub enum ConversationError {
    /// The template does not render it.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// Its text has no tokens.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl ConversationError {
    /// What the user can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            ConversationError::Template(error) => error.hint(),
            ConversationError::Tokenizer(error) => error.hint(),
        }
    }
}

/// The tokens between which a model thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinkMarks {
    /// It begins to.
    pub open: u32,
    /// It has.
    pub close: u32,
}

impl ThinkMarks {
    /// Those of a vocabulary that has them.
    pub fn of(control: &ControlTokens) -> Option<ThinkMarks> {
        Some(ThinkMarks { open: control.id("<think>")?, close: control.id("</think>")? })
    }

    /// Whether what follows `prompt` is a thought.
    pub fn left_open(&self, prompt: &[u32]) -> bool {
        prompt.iter().rev().find(|id| **id == self.open || **id == self.close) == Some(&self.open)
    }
}

/// Something that was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// By whom.
    pub role: Role,
    /// What.
    pub content: String,
    /// What was thought before.
    pub reasoning: Option<String>,
}

impl Said {
    fn new(role: Role, content: impl Into<String>) -> Said {
        Said { role, content: content.into(), reasoning: None }
    }
}

/// What became of a turn.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// Tokens of the answer, without that which ended it.
    pub ids: &'a [u32],
    /// What of it was thought.
    pub reasoning: &'a str,
    /// What of it was said, as it was shown.
    pub content: &'a str,
    /// Whether it ended in the middle of a thought.
    pub is_thought: bool,
    /// Whether it ended before a text that its last tokens hold, and that was not shown.
    pub is_cut: bool,
}

/// See the module's description.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversation {
    said: Vec<Said>,
    /// Tokens of all of it, where they are known; the last of them are those of an answer.
    ids: Vec<u32>,
}

impl Conversation {
    /// One in which nothing was said but instructions.
    pub fn begin(system: Option<&str>) -> Conversation {
        let said = system.map(|text| Said::new(Role::System, text));
        Conversation { said: said.into_iter().collect(), ids: Vec::new() }
    }

    /// What was said.
    pub fn said(&self) -> &[Said] {
        &self.said
    }

    /// Whether somebody said something.
    pub fn is_begun(&self) -> bool {
        self.said.iter().any(|said| said.role != Role::System)
    }

    /// Tokens of all of it; none where they are not known, or there are none yet.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The instructions that it begins with.
    pub fn system(&self) -> Option<&str> {
        self.said.first().filter(|said| said.role == Role::System).map(|said| said.content.as_str())
    }

    /// Exchanges the instructions: where they are others, all that follows them will be read again.
    pub fn instruct(&mut self, system: &str) {
        if self.system() == Some(system) {
            return;
        }
        let instructions = Said::new(Role::System, system);
        match self.said.first_mut().filter(|said| said.role == Role::System) {
            Some(first) => *first = instructions,
            None => self.said.insert(0, instructions),
        }
        self.ids.clear();
    }

    /// The prompt of a turn in which the user says `text`: all tokens that come before the answer.
    pub fn prompt(
        &self,
        text: &str,
        template: &ChatTemplate,
        tokenizer: &Tokenizer,
        thinks: bool,
    ) -> Result<Vec<u32>, ConversationError> {
        let options = RenderOptions { enable_thinking: Some(thinks), add_generation_prompt: true };
        let render = |messages: &[Message]| template.render(messages, &options, tokenizer.control());
        let mut messages: Vec<Message> = self.said.iter().map(|said| Message::new(said.role, &said.content)).collect();
        messages.push(Message::new(Role::User, text));
        if let Some(stand_in) = self.stand_in(text) {
            let answer = messages.len() - 2;
            let content = std::mem::replace(&mut messages[answer].content, stand_in.to_string());
            if let Some(rest) = after_last(render(&messages)?, stand_in) {
                let added = tokenizer.encode_rendered(&rest)?;
                if !added.is_empty() {
                    return Ok([&self.ids[..], &added].concat());
                }
            }
            messages[answer].content = content;
        }
        Ok(tokenizer.encode_rendered(&render(&messages)?)?)
    }

    /// Adds the turn in which the user said `text`, which `prompt` was made of.
    pub fn answered(
        &mut self,
        text: &str,
        prompt: Vec<u32>,
        answer: &Answer,
        tokenizer: &Tokenizer,
    ) -> Result<(), ConversationError> {
        let marks = ThinkMarks::of(tokenizer.control());
        let mut ids = prompt;
        match answer.is_cut {
            true => ids.extend(cut(answer, marks, tokenizer)?),
            false => ids.extend_from_slice(answer.ids),
        }
        // What comes next is no part of the thought.
        ids.extend(marks.filter(|_| answer.is_thought).map(|marks| marks.close));
        self.ids = ids;
        let reasoning = (!answer.reasoning.is_empty()).then(|| answer.reasoning.to_owned());
        let said = Said { reasoning, ..Said::new(Role::Assistant, answer.content) };
        self.said.extend([Said::new(Role::User, text), said]);
        Ok(())
    }

    /// A character that stands for the last answer where its tokens are known: one that nobody said.
    fn stand_in(&self, text: &str) -> Option<char> {
        let answered = !self.ids.is_empty() && self.said.last().is_some_and(|said| said.role == Role::Assistant);
        let is_said = |c: &char| text.contains(*c) || self.said.iter().any(|said| said.content.contains(*c));
        let mut free = (0..=u32::from(u16::MAX)).filter_map(|n| char::from_u32(STAND_IN_LAST - n));
        if answered { free.find(|c| !is_said(c)) } else { None }
    }

    /// The conversation as JSON: `messages` as chat programs exchange them, and the tokens.
    pub fn to_json(&self, tokenizer: &Tokenizer) -> String {
        let message = |said: &Said| {
            let mut message = json!({ "role": said.role.name(), "content": said.content });
            if let Some(reasoning) = &said.reasoning {
                message["reasoning_content"] = reasoning.as_str().into();
            }
            message
        };
        let messages: Vec<Json> = self.said.iter().map(message).collect();
        let object = json!({
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "messages": messages,
            "ids": self.ids,
            "ids_of": format!("{:016x}", self.checksum(tokenizer)),
        });
        format!("{object}\n")
    }

    /// A conversation from JSON: an object with `messages`, or their list alone. Its tokens count where they are of these
    /// messages and this vocabulary. What is wrong with it, where it is none.
    pub fn from_json(text: &str, tokenizer: &Tokenizer) -> Result<Conversation, String> {
        let json: Json = serde_json::from_str(text).map_err(|e| format!("it is not JSON: {e}"))?;
        let version = json.get("schema_version").map_or(Some(SCHEMA_VERSION), Json::as_u64);
        if version != Some(SCHEMA_VERSION) {
            return Err("it is of a later version of this program".to_owned());
        }
        let messages = json.get("messages").unwrap_or(&json);
        let messages = messages.as_array().ok_or("it has no list of messages")?;
        let said =
            messages.iter().enumerate().map(|(i, message)| parse_said(message).map_err(|e| format!("message {i} {e}")));
        let mut conversation = Conversation { said: said.collect::<Result<_, _>>()?, ids: Vec::new() };
        let checksum = format!("{:016x}", conversation.checksum(tokenizer));
        if json.get("ids_of").and_then(Json::as_str) == Some(&checksum) {
            conversation.ids = parse_ids(&json["ids"], tokenizer.vocab_size());
        }
        Ok(conversation)
    }

    /// Of messages and vocabulary: what the tokens belong to.
    fn checksum(&self, tokenizer: &Tokenizer) -> u64 {
        self.said.iter().fold(tokenizer.fingerprint(), |seed, said| {
            let parts = [said.role.name(), &said.content, said.reasoning.as_deref().unwrap_or_default()];
            parts.into_iter().fold(seed, |seed, part| xxh3_64_with_seed(part.as_bytes(), seed))
        })
    }
}

/// What follows the last of `stand_in`.
fn after_last(rendered: Rendered, stand_in: char) -> Option<Rendered> {
    let mut pieces = rendered.pieces;
    let at = pieces.iter().rposition(|piece| piece.text.contains(stand_in))?;
    pieces.drain(..at);
    let behind = pieces[0].text.rfind(stand_in)? + stand_in.len_utf8();
    pieces[0].text.drain(..behind);
    Some(Rendered { pieces })
}

/// Tokens of an answer that ends inside of them: as many as were shown whole, and the text of the rest.
fn cut(answer: &Answer, marks: Option<ThinkMarks>, tokenizer: &Tokenizer) -> Result<Vec<u32>, TokenizerError> {
    let of_thought =
        marks.and_then(|marks| answer.ids.iter().rposition(|id| *id == marks.close)).map_or(0, |at| at + 1);
    let (mut count, mut shown) = (of_thought, 0);
    for &id in &answer.ids[of_thought..] {
        let bytes = if tokenizer.is_special(id) { 0 } else { tokenizer.token_bytes(id).len() };
        if shown + bytes > answer.content.len() || !answer.content.is_char_boundary(shown + bytes) {
            break;
        }
        (count, shown) = (count + 1, shown + bytes);
    }
    let rest = tokenizer.encode_plain(&answer.content[shown..])?;
    Ok([&answer.ids[..count], &rest].concat())
}

fn parse_said(message: &Json) -> Result<Said, String> {
    let text = |name: &str| match message.get(name) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(format!("has a {name} that is no text")),
    };
    let name = text("role")?.ok_or("has no role")?;
    let roles = [Role::System, Role::User, Role::Assistant, Role::Tool];
    let role = roles.into_iter().find(|role| role.name() == name).ok_or_else(|| format!("has the role {name:?}"))?;
    let (content, reasoning) = (text("content")?, text("reasoning_content")?);
    Ok(Said { role, content: content.unwrap_or_default(), reasoning })
}

/// None where there is one that no vocabulary of this size has.
fn parse_ids(json: &Json, vocab: usize) -> Vec<u32> {
    let id = |id: &Json| id.as_u64().filter(|id| *id < vocab as u64).map(|id| id as u32);
    json.as_array().and_then(|ids| ids.iter().map(id).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// `<|system|>`, `<|user|>`, `<|assistant|>`, `<think>`, `</think>` and what every conversation begins with.
    const SYSTEM: u32 = 4090;
    const USER: u32 = 4091;
    const ASSISTANT: u32 = 4092;
    const THINK: u32 = 4094;
    const THOUGHT: u32 = 4095;
    const BEGIN: [u32; 2] = [4086, 4088];

    fn tales() -> (ChatTemplate, Tokenizer) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales");
        (ChatTemplate::open(&dir).unwrap(), Tokenizer::open(&dir).unwrap())
    }

    fn answer<'a>(ids: &'a [u32], content: &'a str) -> Answer<'a> {
        Answer { ids, reasoning: "", content, is_thought: false, is_cut: false }
    }

    #[test]
    fn a_turn_adds_what_the_template_writes_behind_an_answer_and_nothing_else() {
        let (template, tokenizer) = tales();
        let plain = |text: &str| tokenizer.encode_plain(text).unwrap();
        let mut conversation = Conversation::begin(Some("Be kind."));
        let first = conversation.prompt("Who are you?", &template, &tokenizer, false).unwrap();
        let expected =
            [&BEGIN[..], &[SYSTEM], &plain("Be kind."), &[USER], &plain("Who are you?"), &[ASSISTANT, THOUGHT]]
                .concat();
        assert_eq!(first, expected);
        // An answer as no tokenizer would cut it, a letter a token.
        let ids: Vec<u32> = "A fox".chars().flat_map(|c| plain(&c.to_string())).collect();
        assert_ne!(ids, plain("A fox"));
        conversation.answered("Who are you?", first.clone(), &answer(&ids, "A fox"), &tokenizer).unwrap();
        let second = conversation.prompt("Why?", &template, &tokenizer, true).unwrap();
        let added = [&[USER][..], &plain("Why?"), &[ASSISTANT, THINK]].concat();
        assert_eq!(second, [&first[..], &ids, &added].concat());
    }

    #[test]
    fn thoughts_stay_where_they_were_thought_and_are_ended() {
        let (template, tokenizer) = tales();
        let plain = |text: &str| tokenizer.encode_plain(text).unwrap();
        let marks = ThinkMarks::of(tokenizer.control()).unwrap();
        assert_eq!((marks.open, marks.close), (THINK, THOUGHT));
        for is_thought in [false, true] {
            let mut conversation = Conversation::default();
            let prompt = conversation.prompt("a", &template, &tokenizer, true).unwrap();
            assert!(marks.left_open(&prompt));
            let said = [&plain("hm")[..], if is_thought { &[] } else { &[THOUGHT] }].concat();
            let ids = [&said[..], &if is_thought { vec![] } else { plain("b") }].concat();
            let content = if is_thought { "" } else { "b" };
            let answer = Answer { reasoning: "hm", is_thought, ..answer(&ids, content) };
            conversation.answered("a", prompt.clone(), &answer, &tokenizer).unwrap();
            let ended = [&prompt[..], &plain("hm"), &[THOUGHT], &plain(content)].concat();
            assert_eq!(conversation.ids(), ended);
            let next = conversation.prompt("c", &template, &tokenizer, false).unwrap();
            assert_eq!(next, [&ended[..], &[USER], &plain("c"), &[ASSISTANT, THOUGHT]].concat());
            assert!(!marks.left_open(&next));
        }
    }

    #[test]
    fn control_tokens_that_people_type_are_text_in_every_turn() {
        let (template, tokenizer) = tales();
        let typed = "Say <|user|> and </think> and [gMASK]\u{10FFFD}.";
        let mut conversation = Conversation::default();
        for turn in 1..=3 {
            let prompt = conversation.prompt(typed, &template, &tokenizer, false).unwrap();
            let count = |id| prompt.iter().filter(|other| **other == id).count();
            assert_eq!([count(USER), count(ASSISTANT), count(THOUGHT), count(BEGIN[0])], [turn, turn, turn, 1]);
            let ids = tokenizer.encode_plain(typed).unwrap();
            conversation.answered(typed, prompt, &answer(&ids, typed), &tokenizer).unwrap();
        }
    }

    #[test]
    fn an_answer_that_ends_before_a_text_has_the_tokens_that_were_shown() {
        let (template, tokenizer) = tales();
        let ids = tokenizer.encode_plain("There was a fox. The end, she said.").unwrap();
        let mut conversation = Conversation::default();
        let prompt = conversation.prompt("a", &template, &tokenizer, false).unwrap();
        let shown = "There was a fox. T";
        let answer = Answer { is_cut: true, ..answer(&ids, shown) };
        conversation.answered("a", prompt.clone(), &answer, &tokenizer).unwrap();
        let kept = conversation.ids().strip_prefix(&prompt[..]).unwrap();
        let text: Vec<u8> = kept.iter().flat_map(|id| tokenizer.token_bytes(*id).to_vec()).collect();
        assert_eq!(text, shown.as_bytes());
        assert!(ids.starts_with(&kept[..kept.len() - 1]), "tokens that the model chose, and one that it did not");
    }

    #[test]
    fn other_instructions_are_another_conversation_from_there_on() {
        let (template, tokenizer) = tales();
        let mut conversation = Conversation::begin(Some("Be kind."));
        let prompt = conversation.prompt("a", &template, &tokenizer, false).unwrap();
        let ids = tokenizer.encode_plain("b").unwrap();
        conversation.answered("a", prompt, &answer(&ids, "b"), &tokenizer).unwrap();
        let before = conversation.clone();
        conversation.instruct("Be kind.");
        assert_eq!(conversation, before);
        conversation.instruct("Be brief.");
        let prompt = conversation.prompt("c", &template, &tokenizer, false).unwrap();
        let text = |id: u32| {
            tokenizer
                .control()
                .name(id)
                .map_or_else(|| String::from_utf8(tokenizer.token_bytes(id).to_vec()).unwrap(), str::to_owned)
        };
        let text: String = prompt.into_iter().map(text).collect();
        let expected = "[gMASK]<sop><|system|>Be brief.<|user|>a<|assistant|></think>b<|user|>c<|assistant|></think>";
        assert_eq!(text, expected);
    }

    #[test]
    fn what_is_saved_is_loaded_and_tokens_only_of_the_same_messages_and_vocabulary() {
        let (template, tokenizer) = tales();
        let mut conversation = Conversation::begin(Some("Be kind."));
        let prompt = conversation.prompt("a\n🦊", &template, &tokenizer, false).unwrap();
        let ids = tokenizer.encode_plain("b").unwrap();
        let said = Answer { reasoning: "hm", ..answer(&ids, "b") };
        conversation.answered("a\n🦊", prompt, &said, &tokenizer).unwrap();
        let json = conversation.to_json(&tokenizer);
        assert_eq!(Conversation::from_json(&json, &tokenizer).unwrap(), conversation);
        // Somebody changed a word.
        let changed = Conversation::from_json(&json.replace("Be kind.", "Be rude."), &tokenizer).unwrap();
        assert_eq!((changed.ids(), changed.system()), (&[][..], Some("Be rude.")));
        let other = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-glm-moe-dsa");
        let loaded = Conversation::from_json(&json, &Tokenizer::open(&other).unwrap()).unwrap();
        assert_eq!((loaded.said(), loaded.ids()), (conversation.said(), &[][..]));
        // As other programs write it.
        let list = r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]"#;
        let loaded = Conversation::from_json(list, &tokenizer).unwrap();
        assert_eq!((loaded.said().len(), loaded.said()[1].content.as_str()), (2, ""));
    }

    #[test]
    fn what_is_no_conversation_is_refused_with_the_reason() {
        let (_, tokenizer) = tales();
        for (text, words) in [
            ("once upon a time", "not JSON"),
            ("{}", "no list of messages"),
            (r#"{"messages": 3}"#, "no list of messages"),
            (r#"[{"content": "a"}]"#, "message 0 has no role"),
            (r#"[{"role": "user"}, {"role": "king"}]"#, "message 1 has the role \"king\""),
            (r#"[{"role": "user", "content": [1]}]"#, "message 0 has a content that is no text"),
            (r#"{"schema_version": 2, "messages": []}"#, "later version"),
        ] {
            let refused = Conversation::from_json(text, &tokenizer).unwrap_err();
            assert!(refused.contains(words), "{refused}");
        }
    }
}
