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
mod llama;
mod mistral;
mod mixtral;
mod names;
mod network;
mod qwen2;
mod qwen3;
mod qwen3moe;
mod read;
mod reader;
mod rotary;
mod served;
mod settings;
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
pub(crate) use network::{ExpertTensors, FeedForward, Heads, LayerTensors, Matrix, NormTensors, fingerprint};
pub(crate) use rotary::RotarySettings;
pub(crate) use served::NAMES;
