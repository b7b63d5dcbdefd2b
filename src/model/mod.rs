//! What surrounds the weights of a model: its tokenizer, its chat template, its text as it streams out.

pub mod conversation;
pub mod detokenizer;
pub mod load;
mod pyjson;
pub mod resident;
pub mod template;
pub mod tokenizer;
pub mod weights;
