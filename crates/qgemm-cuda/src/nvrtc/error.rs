//! NVRTC errors.

use std::ffi::NulError;

use thiserror::Error;

use crate::target::Target;

/// NVRTC errors.
#[derive(Debug, Error, Clone)]
#[non_exhaustive]
pub enum NvrtcError {
    /// The library was not found.
    #[error("no NVRTC: {why}")]
    Missing {
        /// Searched locations.
        why: String,
    },
    /// The library does not support a target.
    #[error("NVRTC {version} does not compile for {target}, only for {supported:?}")]
    UnsupportedTarget {
        /// Library version.
        version: String,
        /// The requested target.
        target: Target,
        /// Supported compute capabilities.
        supported: Vec<u32>,
    },
    /// The source does not compile.
    #[error("{log}")]
    Compile {
        /// Compiler options.
        options: String,
        /// The compiler's log.
        log: String,
    },
    /// Another call failed.
    #[error("{call}: {message}")]
    Call {
        /// The call.
        call: &'static str,
        /// The library's message.
        message: String,
    },
}

impl From<NulError> for NvrtcError {
    fn from(error: NulError) -> Self {
        NvrtcError::Call { call: "nvrtcCreateProgram", message: error.to_string() }
    }
}
