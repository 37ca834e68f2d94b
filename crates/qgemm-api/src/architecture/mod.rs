//! Architectures as data, one file each,
//! and the settings that models state.

mod decoder;
mod description;
mod encoder;
mod encoder_names;
mod gemma;
mod gemma3;
mod gpt_oss;
mod hyperparameters;
mod layer_parts;
mod lfm2;
mod llama;
mod mistral;
mod mixtral;
mod names;
mod nemotron_h;
mod network;
mod qwen2;
mod qwen3;
mod qwen35;
mod qwen3moe;
mod qwen3next;
mod read;
mod reader;
mod recurrence;
mod rotary;
mod served;
mod settings;
mod sizes;
mod sliding_window;
mod to_gguf;

pub use encoder::EncoderNumbers;
pub use encoder_names::{EncoderNames, GGUF as GGUF_ENCODER, HUGGING_FACE as HUGGING_FACE_ENCODER};
pub use hyperparameters::{ExpertNumbers, Hyperparameters};
pub use network::Network;
pub use served::ENCODERS;
pub use settings::{Key, Settings};
pub use to_gguf::{GgufConversion, GgufName};

pub(crate) use hyperparameters::shape;
pub(crate) use network::{
    AttentionTensors, ConvTensors, ExpertTensors, FeedForward, Heads, Kernel, LayerTensors, LinearForm, LinearTensors,
    Matrix, Mixer, NormTensors, Rows, SharedExpert, fingerprint,
};
pub(crate) use recurrence::{LinearNumbers, RecurrentNumbers};
pub(crate) use rotary::RotarySettings;
pub(crate) use served::NAMES;
