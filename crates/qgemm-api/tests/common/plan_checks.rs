//! Invariants of all plans.

use std::fs;
use std::path::Path;

use qgemm_api::exec::ExecPlan;
use serde_json::Value;

use super::schema::validate;

pub fn check_schemas(plan: &ExecPlan) {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let schema = |name: &str| -> Value {
        let text = fs::read_to_string(docs.join(name)).expect("it is in the repository");
        serde_json::from_str(&text).expect("JSON")
    };
    let (exec, memory) = (schema("qgemm.exec.v1.schema.json"), schema("qgemm.memory.v1.schema.json"));
    let value = serde_json::to_value(plan).expect("JSON");
    validate(&exec, &exec, &value, "plan");
    validate(&memory, &memory, &value["memory"], "plan.memory");
}

/// Checks that no two live regions share a byte, canaries included.
pub fn check_memory(plan: &ExecPlan) {
    let regions = &plan.memory.regions;
    for (place, a) in regions.iter().enumerate() {
        assert!(a.offset + a.reserved <= plan.memory.arena_bytes && a.offset % plan.memory.alignment == 0);
        assert!(a.reserved >= a.bytes + plan.memory.canary_bytes, "{}", a.name);
        for b in &regions[place + 1..] {
            let live = a.first_op <= b.last_op && b.first_op <= a.last_op;
            let touch = a.offset < b.offset + b.reserved && b.offset < a.offset + a.reserved;
            assert!(!(live && touch), "{} and {}", a.name, b.name);
        }
    }
}
