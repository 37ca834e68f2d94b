//! Small examples on the CPU: layers with their own plans
//! in one arena, and streams.

#[path = "../examples/layers.rs"]
#[allow(dead_code, reason = "the test is the program")]
mod layers;
#[path = "../examples/streams.rs"]
#[allow(dead_code, reason = "the test is the program")]
mod streams;

use qgemm_api::Context;

#[test]
fn a_block_adds_to_what_it_is_given() {
    let results = layers::run(&Context::open("cpu").expect("always there")).expect("runs");
    assert_eq!(results.iter().map(|(tokens, _)| *tokens).collect::<Vec<_>>(), [1, 7, 16]);
    // X is below 0.1, and the block adds to it.
    assert!(results.iter().all(|(_, largest)| *largest > 0.1 && *largest < 1e3), "{results:?}");
}

#[test]
fn layers_that_were_loaded_meanwhile_pass_on_what_they_are_given() {
    let out = streams::run(&Context::open("cpu").expect("always there")).expect("runs");
    assert!(out.iter().all(|v| (v - 1.0).abs() < 0.01), "{out:?}");
}
