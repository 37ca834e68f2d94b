//! LFM2: layers of short convolutions, and layers of attention.

use super::description::{Architecture, LayerPattern, Recurrence, Window};
use super::names::{GGUF_LFM2, LFM2 as NAMES};

/// The architecture.
pub static LFM2: Architecture = Architecture {
    name: "lfm2",
    model_type: "lfm2",
    gguf_names: &GGUF_LFM2,
    names: &NAMES,
    layers: LayerPattern::ByHeads("conv"),
    recurrence: Recurrence::ShortConv,
    head_norms: true,
    window: Window::AllLayers,
    ..Architecture::BASE
};
