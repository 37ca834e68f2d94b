//! Embedded bundles of the feature `embed-kernels`: those in `QGEMM_EMBED_KERNELS` at
//! build time, checked by the build script.

/// File names and contents.
#[cfg(feature = "embed-kernels")]
pub(super) static BUNDLES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// No embedded bundles.
#[cfg(not(feature = "embed-kernels"))]
pub(super) static BUNDLES: &[(&str, &[u8])] = &[];
