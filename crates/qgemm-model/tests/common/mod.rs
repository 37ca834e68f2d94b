//! Shared parts of language-model tests: small random checkpoints,
//! a plain forward pass, and runs to the end.
#![allow(dead_code, reason = "each test uses some of it")]

pub mod checkpoint;
pub mod encoder;
pub mod fp4_experts;
pub mod hybrid;
pub mod hybrid_reference;
pub mod reference;

use std::collections::BTreeMap;

use qgemm_model::{Engine, Finish, Generation, Output, SessionId};

/// Output of a session.
#[derive(Debug, Default)]
pub struct Outcome {
    pub ids: Vec<u32>,
    pub text: String,
    pub finish: Option<Finish>,
}

impl Outcome {
    pub fn add(&mut self, output: Output) {
        self.ids.extend(output.token.map(|token| token.id));
        self.text += &output.text;
        assert!(self.finish.is_none(), "an ended session goes on");
        self.finish = output.finish;
    }
}

/// Runs all sessions to their ends.
pub fn run_all(engine: &mut Engine) -> BTreeMap<SessionId, Outcome> {
    let mut outcomes = BTreeMap::<SessionId, Outcome>::new();
    while !engine.is_idle() {
        for output in engine.step().expect("a step") {
            outcomes.entry(output.session).or_default().add(output);
        }
    }
    outcomes
}

/// Runs one session to its end.
pub fn run_one(engine: &mut Engine, prompt: &[u32], generation: Generation) -> Outcome {
    let id = engine.start(prompt, generation).expect("a valid prompt");
    run_all(engine).remove(&id).expect("an outcome")
}

/// Greedy decoding of `tokens` tokens, whatever they are.
pub fn greedy(tokens: usize) -> Generation {
    Generation { max_tokens: tokens, ignore_end: true, ..Generation::default() }
}
