//! Experts as checkpoints of gpt-oss store them: MXFP4 in
//! `_blocks` and `_scales`, alternating rows of gate and up.

use super::checkpoint::{EXPERT_INTERMEDIATE, EXPERTS, HIDDEN, Stored, Tensor};

/// Values of E2M1's codes.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
/// Every block's scale, as an exponent of 2.
pub const EXPONENT: i32 = -4;
const BLOCK: usize = 32;

/// The tensors of a layer's experts, from those of its GGUF file.
pub fn of_layer(layer: usize, tensors: &[Tensor]) -> Vec<Stored> {
    let values = |part: &str| {
        let name = format!("blk.{layer}.{part}");
        &tensors.iter().find(|tensor| tensor.name == name).expect("a tensor of experts").values
    };
    let alternating = |kind: &str, k: usize| -> Vec<f32> {
        let [gate, up] = ["ffn_gate_exps", "ffn_up_exps"].map(|part| values(&format!("{part}.{kind}")));
        gate.chunks(k).zip(up.chunks(k)).flat_map(|(gate, up)| [gate, up].concat()).collect()
    };
    let name = |part: &str| format!("model.layers.{layer}.mlp.experts.{part}");
    let plain = |part: &str, shape: [usize; 2], values: Vec<f32>| {
        Stored::from(Tensor { name: name(part), shape: shape.to_vec(), values })
    };
    let rows = 2 * EXPERT_INTERMEDIATE;
    [
        blocks(&name("gate_up_proj"), [EXPERTS, rows, HIDDEN], &alternating("weight", HIDDEN)),
        blocks(&name("down_proj"), [EXPERTS, HIDDEN, EXPERT_INTERMEDIATE], values("ffn_down_exps.weight")),
        vec![
            plain("gate_up_proj_bias", [EXPERTS, rows], alternating("bias", 1)),
            plain("down_proj_bias", [EXPERTS, HIDDEN], values("ffn_down_exps.bias").clone()),
        ],
    ]
    .concat()
}

/// Codes and scales of values that MXFP4 stores exactly.
fn blocks(name: &str, [experts, n, k]: [usize; 3], values: &[f32]) -> Vec<Stored> {
    let code = |value: f32| {
        let wanted = value / 2f32.powi(EXPONENT);
        E2M1.iter().position(|known| known.to_bits() == wanted.to_bits()).expect("a value of E2M1") as u8
    };
    let codes = values.chunks(2).map(|pair| code(pair[0]) | code(pair[1]) << 4).collect();
    let scale = (127 + EXPONENT) as u8;
    let stored = |part: &str, shape: &[usize], bytes: Vec<u8>| Stored {
        name: format!("{name}_{part}"),
        dtype: "U8",
        shape: shape.to_vec(),
        bytes,
    };
    let per_row = k / BLOCK;
    vec![
        stored("blocks", &[experts, n, per_row, BLOCK / 2], codes),
        stored("scales", &[experts, n, per_row], vec![scale; experts * n * per_row]),
    ]
}
