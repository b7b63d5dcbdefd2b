//! Where the engine and transformers as it is differ: only behind a tie of the indexer.

use millstream::engine::AttentionForm;

use super::reference::Reference;
use super::scores::{argmaxes, differing};
use super::{largest_difference, open};

/// For each sparse prompt: every position where the engine's argmax is not the original's comes after (or at) a
/// position whose indexer chose among equal scores, and transformers itself changes its mind there when its topk is made
/// stable. Before the first tie, logits are those of the original.
fn differences_come_from_ties(reference: &Reference) {
    let mut engine = open(&reference.model, AttentionForm::Absorbed);
    let vocab = engine.arch().vocab;
    for (name, stable) in reference.stable.iter().filter(|(_, p)| !p.tied_positions.is_empty()) {
        let original = &reference.original[name];
        let logits = engine.score(&original.ids).unwrap();
        let ours = differing(&argmaxes(&logits, vocab), &original.argmax);
        let theirs = differing(&stable.argmax, &original.argmax);
        let first_tie = stable.tied_positions[0];
        println!(
            "{name}: {} of {} positions differ from the original, {} tied positions, the first at {first_tie}",
            ours.len(),
            original.ids.len(),
            stable.tied_positions.len(),
        );
        assert_eq!(ours, theirs, "{name}");
        assert!(ours.iter().all(|&p| p >= first_tie), "{name}: {ours:?} differ, the first tie is at {first_tie}");
        if let Some(all) = original.all_logits() {
            let before = first_tie * vocab;
            let error = largest_difference(&logits[..before], &all[..before]);
            assert!(error < reference.margin_min() / 2.0, "{name}: {error} before the first tie");
        }
    }
}

#[test]
fn of_glm_tales() {
    differences_come_from_ties(&Reference::glm_tales());
}

#[test]
fn of_the_tiny_oracle() {
    differences_come_from_ties(&Reference::tiny());
}

/// The stable references are of no use if nothing in them is sparse and untied, or if ties changed everything.
#[test]
fn ties_are_the_exception() {
    for reference in [Reference::glm_tales(), Reference::tiny()] {
        for (name, stable) in &reference.stable {
            assert!(stable.tied_positions.len() < stable.ids.len() / 2 + 1, "{name}");
        }
        assert!(reference.stable.values().any(|p| !p.tied_positions.is_empty()));
    }
}
