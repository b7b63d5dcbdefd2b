//! Lines worth a word before a generation: where what was asked for and the machine, or the model, disagree.

use std::path::Path;

use serde_json::Value;

use crate::engine::sampler::Sampling;

use super::config::RunConfig;
use super::machine::Machine;
use super::size;

/// Where the settings and the machine disagree.
pub fn on_machine(config: &RunConfig, machine: &Machine) -> Vec<String> {
    let memory = &machine.memory;
    let room = size::show(memory.available);
    let mut notes = Vec::new();
    let most = memory.space.map_or(memory.available, |space| space.most(0).min(memory.shared));
    match config.ram {
        Some(ram) if memory.known && ram > most && most < memory.shared => notes.push(format!(
            "{} of memory are allowed, and the {} leaves {room}: that is what counts",
            size::show(ram),
            memory.source
        )),
        Some(ram) if memory.known && ram > most => notes.push(format!(
            "{} of memory are allowed and {room} are available ({}): the system may swap, or end the program",
            size::show(ram),
            memory.source
        )),
        None if memory.limited => {
            notes.push(format!("the {} leaves {room}, less than the machine has: that is what counts", memory.source))
        }
        _ => {}
    }
    if config.threads > machine.cores {
        let cores = if machine.cores == 1 { "1 core".into() } else { format!("{} cores", machine.cores) };
        notes.push(format!("{} threads share the {cores} this process may use: fewer are faster", config.threads));
    }
    notes
}

/// Where the sampling differs from what the model in `dir` comes with.
pub fn on_sampling(dir: &Path, sampling: &Sampling) -> Option<String> {
    let text = std::fs::read(dir.join("generation_config.json")).ok()?;
    let published: Value = serde_json::from_slice(&text).ok()?;
    let ours = [
        ("temperature", f64::from(sampling.temperature)),
        ("top_p", f64::from(sampling.top_p)),
        ("top_k", sampling.top_k as f64),
        ("min_p", f64::from(sampling.min_p)),
    ];
    let differing: Vec<String> = ours
        .iter()
        .filter_map(|(name, ours)| {
            let theirs = published.get(name)?.as_f64()?;
            // 0.7 of a file is no 32-bit number.
            (theirs as f32 != *ours as f32).then(|| format!("{name} {theirs} (here {})", *ours as f32))
        })
        .collect();
    (!differing.is_empty()).then(|| format!("the model's generation_config.json samples with {}", differing.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_that_the_model_does_not_come_with_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let sampling = Sampling { temperature: 0.7, top_p: 0.9, top_k: 0, min_p: 0.0, seed: 1 };
        let told = |text: &str| {
            std::fs::write(dir.path().join("generation_config.json"), text).unwrap();
            on_sampling(dir.path(), &sampling)
        };
        assert_eq!(told(r#"{"temperature": 0.7, "top_p": 0.9, "eos_token_id": 3}"#), None);
        let expected = "the model's generation_config.json samples with temperature 1 (here 0.7), top_k 50 (here 0)";
        assert_eq!(told(r#"{"temperature": 1.0, "top_p": 0.9, "top_k": 50}"#).unwrap(), expected);
        assert_eq!(told("{"), None);
    }
}
