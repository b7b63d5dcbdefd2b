//! How files are read: the four settings that can be tuned, and what becomes of a profile's where some were asked for.

use std::fmt;

use millstream_io::measure::{Candidate, ChunkSize};
use millstream_io::{DeviceKind, IoMode, settle};

use crate::engine::{Depth, EngineConfig};

use super::args::{self, Chunk};

/// How files are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The mode files are opened in.
    pub io: IoMode,
    /// What reads them.
    pub device: DeviceKind,
    /// How much is read at a time.
    pub depth: Depth,
    /// Largest single request.
    pub chunk: Chunk,
}

/// Which of the settings were asked for, by flag or environment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// [`Reading::io`] was.
    pub io: bool,
    /// [`Reading::device`] was.
    pub device: bool,
    /// [`Reading::depth`] was.
    pub depth: bool,
    /// [`Reading::chunk`] was.
    pub chunk: bool,
}

impl Reading {
    /// What is not asked for: everything is left to the engine.
    pub const DEFAULT: Reading =
        Reading { io: IoMode::Auto, device: DeviceKind::Auto, depth: Depth::Auto, chunk: Chunk::Auto };

    /// The settings that read as `candidate` does. Direct reads and the ring are what the engine takes by itself where
    /// they are to be had; by name they would be refused where they no longer are.
    pub fn of(candidate: &Candidate) -> Reading {
        Reading {
            io: if candidate.mode == IoMode::Direct { IoMode::Auto } else { candidate.mode },
            device: if candidate.device == DeviceKind::Uring { DeviceKind::Auto } else { candidate.device },
            depth: Depth::Slabs(candidate.depth),
            chunk: match candidate.chunk {
                ChunkSize::Auto => Chunk::Auto,
                ChunkSize::Whole => Chunk::Whole,
                ChunkSize::Bytes(bytes) => Chunk::Bytes(bytes),
            },
        }
    }

    /// These settings, with those of a profile in place of all that were not asked for. Of a profile's mode and device,
    /// the one that goes not with what was asked for is left out, never refused.
    pub fn tuned(self, asked: Asked, profile: Reading) -> Reading {
        let io = if asked.io { self.io } else { profile.io };
        let device = if asked.device { self.device } else { profile.device };
        let fits = settle(io, device).is_ok();
        Reading {
            io: if fits { io } else { self.io },
            device: if fits { device } else { self.device },
            depth: if asked.depth { self.depth } else { profile.depth },
            chunk: if asked.chunk { self.chunk } else { profile.chunk },
        }
    }

    /// An engine's configuration, reading this way.
    pub fn configure(&self, config: EngineConfig) -> EngineConfig {
        EngineConfig { io: self.io, device: self.device, depth: self.depth, chunk_bytes: self.chunk.bytes(), ..config }
    }

    /// The settings by the names of their flags, as they are typed.
    pub fn texts(&self) -> [(&'static str, String); 4] {
        let depth = match self.depth {
            Depth::Auto => "auto".to_owned(),
            Depth::Slabs(slabs) => slabs.to_string(),
            Depth::Bytes(bytes) => format!("{bytes}B"),
        };
        let chunk = match self.chunk {
            Chunk::Auto => "auto".to_owned(),
            Chunk::Whole => "whole".to_owned(),
            Chunk::Bytes(bytes) => format!("{}K", bytes >> 10),
        };
        [("io", self.io.to_string()), ("device", self.device.to_string()), ("depth", depth), ("chunk", chunk)]
    }

    /// Reads what [`Reading::texts`] wrote. A mode or a device that is refused where it is not to be had is none that a
    /// profile may name.
    pub fn parse(io: &str, device: &str, depth: &str, chunk: &str) -> Result<Reading, String> {
        let reading = Reading {
            io: io.parse()?,
            device: device.parse()?,
            depth: args::parse_depth(depth)?,
            chunk: args::parse_chunk(chunk)?,
        };
        if matches!(reading.io, IoMode::Direct | IoMode::DontCache) || reading.device == DeviceKind::Uring {
            return Err(format!("the mode {io} or the device {device} may be refused"));
        }
        settle(reading.io, reading.device).map_err(|error| error.to_string())?;
        Ok(reading)
    }
}

impl fmt::Display for Reading {
    /// The flags that ask for it, or `defaults`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let given = self.texts().into_iter().filter(|(_, value)| value != "auto");
        let flags: Vec<String> = given.map(|(name, value)| format!("--{name} {value}")).collect();
        f.write_str(if flags.is_empty() { "defaults" } else { "" })?;
        f.write_str(&flags.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: Reading = Reading {
        io: IoMode::Buffered,
        device: DeviceKind::Threads,
        depth: Depth::Slabs(8),
        chunk: Chunk::Bytes(1 << 20),
    };
    const NOTHING: Asked = Asked { io: false, device: false, depth: false, chunk: false };

    #[test]
    fn what_was_asked_for_wins_setting_by_setting() {
        let default = Reading::DEFAULT;
        assert_eq!(default.tuned(NOTHING, PROFILE), PROFILE);
        let asked = Reading { depth: Depth::Slabs(2), ..default };
        let tuned = asked.tuned(Asked { depth: true, ..NOTHING }, PROFILE);
        assert_eq!(tuned, Reading { depth: Depth::Slabs(2), ..PROFILE });
        // Asking for auto by name is asking.
        let tuned = default.tuned(Asked { device: true, chunk: true, ..NOTHING }, PROFILE);
        assert_eq!(tuned, Reading { device: DeviceKind::Auto, chunk: Chunk::Auto, ..PROFILE });
        let all = Asked { io: true, device: true, depth: true, chunk: true };
        assert_eq!(default.tuned(all, PROFILE), default);
    }

    #[test]
    fn a_profile_never_makes_a_combination_that_is_refused() {
        for io in IoMode::ALL {
            for device in DeviceKind::ALL {
                for (profile_io, profile_device) in [
                    (IoMode::Buffered, DeviceKind::Threads),
                    (IoMode::Mmap, DeviceKind::Mmap),
                    (IoMode::Auto, DeviceKind::Mmap),
                    (IoMode::Drop, DeviceKind::Auto),
                ] {
                    let profile = Reading { io: profile_io, device: profile_device, ..PROFILE };
                    // One of the two asked for.
                    for asked in [Asked { io: true, ..NOTHING }, Asked { device: true, ..NOTHING }] {
                        let typed = Reading {
                            io: if asked.io { io } else { IoMode::Auto },
                            device: if asked.device { device } else { DeviceKind::Auto },
                            ..Reading::DEFAULT
                        };
                        let tuned = typed.tuned(asked, profile);
                        assert!(settle(tuned.io, tuned.device).is_ok(), "{typed:?} with {profile:?}: {tuned:?}");
                        assert_eq!((tuned.depth, tuned.chunk), (PROFILE.depth, PROFILE.chunk));
                    }
                }
            }
        }
        let asked = Reading { io: IoMode::Mmap, ..Reading::DEFAULT };
        let tuned = asked.tuned(Asked { io: true, ..NOTHING }, PROFILE);
        assert_eq!((tuned.io, tuned.device), (IoMode::Mmap, DeviceKind::Auto));
    }

    #[test]
    fn candidates_become_settings_that_are_never_refused() {
        let ring = Reading::of(&Candidate { depth: 2, chunk: ChunkSize::Whole, ..Candidate::RING });
        assert_eq!(ring.to_string(), "--depth 2 --chunk whole");
        let threads = Reading::of(&Candidate { mode: IoMode::Buffered, ..Candidate::THREADS });
        assert_eq!(threads.to_string(), "--io buffered --device threads --depth 4");
        assert_eq!(Reading::DEFAULT.to_string(), "defaults");
    }

    #[test]
    fn settings_are_read_as_they_are_written() {
        let bytes = Reading { depth: Depth::Bytes(64 << 20), ..PROFILE };
        for reading in [PROFILE, Reading::DEFAULT, bytes, Reading { chunk: Chunk::Whole, ..PROFILE }] {
            let [io, device, depth, chunk] = reading.texts().map(|(_, value)| value);
            assert_eq!(Reading::parse(&io, &device, &depth, &chunk), Ok(reading));
        }
        for [io, device, depth, chunk] in [
            ["direct", "auto", "auto", "auto"],
            ["dontcache", "auto", "auto", "auto"],
            ["auto", "uring", "auto", "auto"],
            ["mmap", "threads", "auto", "auto"],
            ["auto", "auto", "0", "auto"],
            ["auto", "auto", "auto", "5"],
            ["psychic", "auto", "auto", "auto"],
        ] {
            assert!(Reading::parse(io, device, depth, chunk).is_err(), "{io} {device} {depth} {chunk}");
        }
    }
}
