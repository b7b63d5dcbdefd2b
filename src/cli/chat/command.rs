//! What begins with a slash.

use std::path::PathBuf;

use crate::cli::Failure;

/// The list that `/help` shows.
pub const HELP: &str = "\
/reset                  forget the conversation, but for its instructions
/save FILE              write the conversation to a file as JSON
/load FILE              go on with a conversation from a file
/stats                  how the last answer came about
/think on|off           let the model think before it answers, or not
/think show|hide        show its thoughts, or not
/help                   this list
/exit                   leave, as Ctrl-D does
Ctrl-C ends an answer: what there is of it stays part of the conversation.
A \\ at its end continues a line on the next; \"\"\" begins and ends a message of several lines.
A line that begins with a blank and a slash is a message.
";

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// `/reset`
    Reset,
    /// `/save`
    Save(PathBuf),
    /// `/load`
    Load(PathBuf),
    /// `/stats`
    Stats,
    /// `/think`: what it is set to, where it is.
    Think(Option<Think>),
    /// `/help`
    Help,
    /// `/exit`
    Exit,
}

/// What can be said about thoughts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Think {
    /// There shall be some.
    On,
    /// There shall be none.
    Off,
    /// They are shown.
    Show,
    /// They are not.
    Hide,
}

impl Command {
    /// Reads a line that begins with a slash.
    pub fn parse(line: &str) -> Result<Command, Failure> {
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let file = |make: fn(PathBuf) -> Command| match rest {
            "" => Err(Failure::usage(format!("{name} needs the name of a file")).hint(format!("{name} fox.json"))),
            rest => Ok(make(PathBuf::from(rest))),
        };
        let alone = |command: Command| match rest {
            "" => Ok(command),
            rest => Err(Failure::usage(format!("{name} takes nothing, and there is {rest:?}"))),
        };
        match name {
            "/reset" => alone(Command::Reset),
            "/save" => file(Command::Save),
            "/load" => file(Command::Load),
            "/stats" => alone(Command::Stats),
            "/think" => Ok(Command::Think(match rest {
                "" => None,
                "on" => Some(Think::On),
                "off" => Some(Think::Off),
                "show" => Some(Think::Show),
                "hide" => Some(Think::Hide),
                other => {
                    return Err(Failure::usage(format!("/think {other} means nothing"))
                        .hint("known are /think on, off, show and hide"));
                }
            })),
            "/help" | "/?" => alone(Command::Help),
            "/exit" | "/quit" => alone(Command::Exit),
            other => Err(Failure::usage(format!("there is no command {other}"))
                .hint("/help lists them; a message that begins with a slash is typed with a blank before it")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_with_what_they_take() {
        let read = |line: &str| Command::parse(line).unwrap();
        assert_eq!(read("/save  a file.json "), Command::Save("a file.json".into()));
        assert_eq!([read("/think"), read("/think hide")], [Command::Think(None), Command::Think(Some(Think::Hide))]);
        assert_eq!([read("/quit"), read("/exit")], [Command::Exit, Command::Exit]);
        for (line, words) in [
            ("/load", "needs the name of a file"),
            ("/reset now", "takes nothing"),
            ("/think aloud", "/think aloud means nothing"),
            ("/etc/passwd", "no command /etc/passwd"),
            ("/", "no command /"),
        ] {
            let failure = Command::parse(line).unwrap_err();
            assert!(failure.code == 2 && failure.error.contains(words), "{}", failure.error);
        }
    }

    #[test]
    fn every_command_is_in_the_list() {
        for line in HELP.lines().filter(|line| line.starts_with('/')) {
            let name = line.split_whitespace().next().unwrap_or_default();
            let known = Command::parse(name).is_ok() || Command::parse(&format!("{name} x")).is_ok();
            assert!(known, "{line}");
        }
    }
}
