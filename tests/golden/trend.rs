//! Precision costs what it should: the trend of `bench/record`, with room for another rounding.
//!
//! Floors are what was measured over these 716 positions, less three standard deviations of a share of 716 (1.3 points at
//! 0.986, 4.2 at 0.834), rounded down to a hundredth.

use millstream::engine::Activations;

use super::quality::{Precision, make, open, precisions, prompt_agreement};

fn agreement(precision: &Precision, activations: Activations) -> f64 {
    let dir = tempfile::tempdir().unwrap();
    make(precision, dir.path());
    let share = prompt_agreement(&mut open(dir.path(), activations));
    println!("{}, {activations:?}: {share:.4}", precision.name);
    share
}

#[test]
#[cfg_attr(debug_assertions, ignore = "minutes without optimization")]
fn experts_tolerate_what_the_rest_does_not() {
    let all = precisions();
    let share = |name: &str, activations| {
        let precision = all.iter().find(|p| p.name == name).unwrap();
        agreement(precision, activations)
    };
    let int8 = share("int8 everywhere", Activations::F32);
    let int8_integer = share("int8 everywhere", Activations::Int8);
    let int4_experts = share("int4 experts, int8 rest (default)", Activations::Int8);
    let int4 = share("int4 everywhere", Activations::Int8);
    let int2_experts = share("int2 experts, int8 rest", Activations::Int8);
    let int2 = share("int2 everywhere", Activations::Int8);
    assert!(int8 >= 0.97, "{int8}");
    assert!(int8_integer >= 0.95, "{int8_integer}");
    assert!(int4_experts >= 0.91, "{int4_experts}");
    assert!(int4 >= 0.79, "{int4}");
    assert!(int8 > int4_experts && int4_experts > int4 + 0.05, "{int8} {int4_experts} {int4}");
    assert!(int4_experts > int2_experts + 0.1 && int2_experts > int2 + 0.1, "{int4_experts} {int2_experts} {int2}");
}
