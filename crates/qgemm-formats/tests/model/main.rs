//! Tests of the readers and the writer of model files.

mod auto_round;
mod checkpoint;
mod gguf_files;
mod grouped_layers;
mod hostile_files;
mod integers;
mod scaled_layers;
mod settings;
mod zero_points;
