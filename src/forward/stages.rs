//! A token's path as data: its stages, what each needs, and what goes on beside the reads.
//!
//! [`super::step`] is what runs; this names the same stages for whoever reports on them or plans with them. It executes
//! nothing and decides nothing. The graph is made from the model at open and checked there.

use std::fmt::Write;

use thiserror::Error;

use super::{GuessFrom, GuessRule};
use crate::checkpoint::arch::{Arch, MlpKind};
use crate::meter::Stage;

/// One stage of one layer, or of the whole step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// What is done; the meter keeps its time under this name.
    pub stage: Stage,
    /// The model layer; none of what is done once a step.
    pub layer: Option<usize>,
    /// Nodes that must be done before, by their places in the graph.
    pub needs: Vec<usize>,
    /// What it has to do with the reads of its layer.
    pub reads: Reads,
}

/// What a stage has to do with reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Nothing: it goes on whatever is being read.
    None,
    /// It begins them.
    Begins,
    /// It needs what they bring.
    Needs,
}

/// The stages of one decode step in the order in which they run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageGraph {
    /// In the order of the loop.
    pub nodes: Vec<Node>,
}

/// A graph that cannot be run as it stands.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GraphFault {
    /// A stage needs one that runs after it.
    #[error("{} needs {}, which runs after it", named(*.node), named(*.needs))]
    Backwards {
        /// Who needs it.
        node: (Stage, Option<usize>),
        /// What is needed.
        needs: (Stage, Option<usize>),
    },
    /// Experts are computed and nothing of their layer asked for them.
    #[error("the experts of layer {layer} are computed and never requested")]
    NotRequested {
        /// Which layer.
        layer: usize,
    },
}

fn named((stage, layer): (Stage, Option<usize>)) -> String {
    layer.map_or_else(|| stage.name().to_owned(), |layer| format!("{} of layer {layer}", stage.name()))
}

impl StageGraph {
    /// The graph of a step of `arch`; with a rule of `guesses`, later routed layers are guessed at.
    pub fn new(arch: &Arch, guesses: Option<GuessRule>) -> StageGraph {
        let mut graph = StageGraph { nodes: vec![] };
        let mut x = graph.add(Stage::Embed, None, &[], Reads::None);
        for (index, layer) in arch.layers.iter().enumerate() {
            let at = Some(index);
            let guesses = guesses.filter(|rule| {
                let mut later = arch.layers[index + 1..].iter().take(rule.layers);
                later.any(|later| later.mlp == MlpKind::Sparse)
            });
            let attended = graph.add(Stage::Attention, at, &[x], Reads::None);
            let hint = |graph: &mut StageGraph, from: GuessFrom, needs: &[usize]| {
                if guesses.is_some_and(|rule| rule.from == from) {
                    graph.add(Stage::Hint, at, needs, Reads::Begins);
                }
            };
            x = match layer.mlp {
                MlpKind::Dense { .. } => {
                    hint(&mut graph, GuessFrom::Attention, &[attended]);
                    let dense = graph.add(Stage::Dense, at, &[attended], Reads::None);
                    hint(&mut graph, GuessFrom::Shared, &[dense]);
                    dense
                }
                MlpKind::Sparse => {
                    let routed = graph.add(Stage::Route, at, &[attended], Reads::None);
                    let requested = graph.add(Stage::Request, at, &[routed], Reads::Begins);
                    // Demand is in the queue before a guess is.
                    hint(&mut graph, GuessFrom::Attention, &[attended, requested]);
                    let mut summed = vec![attended];
                    if arch.moe.shared_width > 0 {
                        let shared = graph.add(Stage::Shared, at, &[attended], Reads::None);
                        hint(&mut graph, GuessFrom::Shared, &[attended, requested, shared]);
                        summed.push(shared);
                    } else {
                        hint(&mut graph, GuessFrom::Shared, &[attended, requested]);
                    }
                    let waited = graph.add(Stage::Wait, at, &[requested], Reads::Needs);
                    summed.push(graph.add(Stage::Experts, at, &[requested, waited], Reads::Needs));
                    graph.add(Stage::Reduce, at, &summed, Reads::None)
                }
            };
        }
        let head = graph.add(Stage::Head, None, &[x], Reads::None);
        graph.add(Stage::Sample, None, &[head], Reads::None);
        graph
    }

    fn add(&mut self, stage: Stage, layer: Option<usize>, needs: &[usize], reads: Reads) -> usize {
        let mut needs = needs.to_vec();
        needs.dedup();
        self.nodes.push(Node { stage, layer, needs, reads });
        self.nodes.len() - 1
    }

    /// Whether the loop can run it: nothing needs what comes later, so there is no cycle, and every layer's experts come
    /// after its request.
    pub fn check(&self) -> Result<(), GraphFault> {
        let name = |at: usize| (self.nodes[at].stage, self.nodes[at].layer);
        for (at, node) in self.nodes.iter().enumerate() {
            if let Some(&needs) = node.needs.iter().find(|&&needs| needs >= at) {
                let needs = if needs < self.nodes.len() { name(needs) } else { (Stage::Other, None) };
                return Err(GraphFault::Backwards { node: name(at), needs });
            }
            if node.stage == Stage::Experts && !self.follows(at, Stage::Request) {
                return Err(GraphFault::NotRequested { layer: node.layer.unwrap_or(0) });
            }
        }
        Ok(())
    }

    /// Whether `at` needs, directly or not, the `stage` of its own layer.
    fn follows(&self, at: usize, stage: Stage) -> bool {
        let layer = self.nodes[at].layer;
        let mut pending = self.nodes[at].needs.clone();
        while let Some(before) = pending.pop() {
            let node = &self.nodes[before];
            if node.layer == layer && node.stage == stage {
                return true;
            }
            // Needs point backwards, which is checked before this, so this ends.
            pending.extend(node.needs.iter().filter(|&&needs| self.nodes[needs].layer == layer));
        }
        false
    }

    /// Stages that may go on while reads of their own layer are under way, where reads and arithmetic may overlap.
    pub fn overlapped(&self) -> impl Iterator<Item = &Node> {
        let is_between = |node: &&Node| {
            let begun = self.nodes.iter().any(|n| n.layer == node.layer && n.stage == Stage::Request);
            begun && matches!(node.stage, Stage::Hint | Stage::Shared | Stage::Experts)
        };
        self.nodes.iter().filter(is_between)
    }

    /// A line a stage; consecutive layers that look the same are shown once.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (first, last, lines) in self.runs() {
            let _ = match (first, last) {
                (Some(first), Some(last)) if first < last => writeln!(text, "layers {first} to {last}"),
                (Some(layer), _) => writeln!(text, "layer {layer}"),
                (None, _) => writeln!(text, "once a step"),
            };
            lines.iter().for_each(|line| text.push_str(line));
        }
        text
    }

    /// Consecutive layers with the same lines: first, last, and the lines.
    fn runs(&self) -> Vec<(Option<usize>, Option<usize>, Vec<String>)> {
        let mut runs: Vec<(Option<usize>, Option<usize>, Vec<String>)> = vec![];
        for chunk in self.nodes.chunk_by(|a, b| a.layer == b.layer) {
            let lines: Vec<String> = chunk.iter().map(|node| self.line(node)).collect();
            match runs.last_mut() {
                Some((Some(_), last, before)) if chunk[0].layer.is_some() && *before == lines => *last = chunk[0].layer,
                _ => runs.push((chunk[0].layer, chunk[0].layer, lines)),
            }
        }
        runs
    }

    fn line(&self, node: &Node) -> String {
        let needs: Vec<String> = node
            .needs
            .iter()
            .map(|&at| &self.nodes[at])
            .map(|needs| match needs.layer == node.layer {
                true => needs.stage.name().to_owned(),
                false => "what came before".to_owned(),
            })
            .collect();
        let reads = match node.reads {
            Reads::None => "",
            Reads::Begins => ", begins reads",
            Reads::Needs => ", needs what was read",
        };
        let needs = if needs.is_empty() { "nothing".to_owned() } else { needs.join(", ") };
        format!("  {:<10} needs {needs}{reads}\n", node.stage.name())
    }

    /// The graph in the language of Graphviz.
    pub fn dot(&self) -> String {
        let mut dot = String::from("digraph step {\n  rankdir=TB;\n  node [shape=box];\n");
        for (at, node) in self.nodes.iter().enumerate() {
            let label = node.layer.map_or_else(String::new, |layer| format!(" {layer}"));
            let look = match node.reads {
                Reads::None => "",
                Reads::Begins => ", style=bold",
                Reads::Needs => ", style=dashed",
            };
            let _ = writeln!(dot, "  n{at} [label=\"{}{label}\"{look}];", node.stage.name());
            for needs in &node.needs {
                let _ = writeln!(dot, "  n{needs} -> n{at};");
            }
        }
        dot.push_str("}\n");
        dot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stages_of_a_step_are_those_of_the_loop() {
        let names = |guesses| {
            let graph = StageGraph::new(&Arch::small(), guesses);
            graph.check().unwrap();
            graph.nodes.iter().map(|node| (node.stage, node.layer)).collect::<Vec<_>>()
        };
        use Stage::*;
        let routed = |l| [Attention, Route, Request, Shared, Wait, Experts, Reduce].map(|stage| (stage, Some(l)));
        let mut expected = vec![(Embed, None), (Attention, Some(0)), (Dense, Some(0))];
        expected.extend(routed(1).into_iter().chain(routed(2)));
        expected.extend([(Head, None), (Sample, None)]);
        assert_eq!(names(None), expected);
        let with = |places: [(usize, usize); 2]| {
            let mut expected = expected.clone();
            places.iter().for_each(|&(at, layer)| expected.insert(at, (Hint, Some(layer))));
            expected
        };
        // A guess before each routed layer, after the demand of the layer it is made in.
        let rule = |from, layers| Some(GuessRule { from, layers });
        let early = with([(2, 0), (7, 1)]);
        assert_eq!(names(rule(GuessFrom::Attention, 1)), early);
        // Or after everything in it that needs no routed expert.
        assert_eq!(names(rule(GuessFrom::Shared, 1)), with([(3, 0), (8, 1)]));
        // Two layers ahead are guessed from the same places.
        assert_eq!(names(rule(GuessFrom::Attention, 2)), early);
        let routed_last = |layers| {
            let mut arch = Arch::small();
            arch.layers[1].mlp = MlpKind::Dense { width: 8 };
            let graph = StageGraph::new(&arch, rule(GuessFrom::Attention, layers));
            graph.nodes.iter().filter(|node| node.stage == Hint).map(|node| node.layer).collect::<Vec<_>>()
        };
        assert_eq!((routed_last(1), routed_last(2)), (vec![Some(1)], vec![Some(0), Some(1)]));
    }

    #[test]
    fn arithmetic_that_needs_no_expert_may_go_on_while_they_are_read() {
        let graph = StageGraph::new(&Arch::small(), Some(GuessRule::default()));
        let overlapped: Vec<_> = graph.overlapped().map(|node| (node.stage, node.layer)).collect();
        use Stage::*;
        assert_eq!(
            overlapped,
            [(Shared, Some(1)), (Hint, Some(1)), (Experts, Some(1)), (Shared, Some(2)), (Experts, Some(2))]
        );
    }

    #[test]
    fn a_graph_that_cannot_run_is_refused() {
        let mut graph = StageGraph::new(&Arch::small(), None);
        let experts = graph.nodes.iter().position(|node| node.stage == Stage::Experts).unwrap();
        graph.nodes[experts].needs = vec![0];
        assert_eq!(graph.check(), Err(GraphFault::NotRequested { layer: 1 }));
        let mut graph = StageGraph::new(&Arch::small(), None);
        graph.nodes[1].needs = vec![3];
        let fault = graph.check().unwrap_err();
        assert_eq!(fault.to_string(), "attention of layer 0 needs attention of layer 1, which runs after it");
        graph.nodes[1].needs = vec![1];
        assert!(matches!(graph.check(), Err(GraphFault::Backwards { .. })), "itself");
        graph.nodes[1].needs = vec![1000];
        assert!(matches!(graph.check(), Err(GraphFault::Backwards { .. })), "what is not there");
    }

    #[test]
    fn layers_that_look_the_same_are_shown_once() {
        let text = StageGraph::new(&Arch::small(), None).text();
        assert_eq!(
            text,
            "\
once a step
  embed      needs nothing
layer 0
  attention  needs what came before
  dense      needs attention
layers 1 to 2
  attention  needs what came before
  route      needs attention
  request    needs route, begins reads
  shared     needs attention
  wait       needs request, needs what was read
  experts    needs request, wait, needs what was read
  reduce     needs attention, shared, experts
once a step
  head       needs what came before
  sample     needs head
"
        );
    }

    #[test]
    fn the_drawing_has_every_stage_and_every_need() {
        let graph = StageGraph::new(&Arch::small(), Some(GuessRule::default()));
        let dot = graph.dot();
        assert_eq!(dot.matches("label=").count(), graph.nodes.len());
        assert_eq!(dot.matches("->").count(), graph.nodes.iter().map(|node| node.needs.len()).sum::<usize>());
        assert!(dot.starts_with("digraph step {") && dot.ends_with("}\n"));
    }
}
