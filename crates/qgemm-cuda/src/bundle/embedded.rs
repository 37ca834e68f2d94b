//! The bundles that the feature `embed-kernels` puts into the program: those in `QGEMM_EMBED_KERNELS` when this crate
//! was built, checked by its build script.

/// File name and contents of each.
#[cfg(feature = "embed-kernels")]
pub(super) static BUNDLES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// Nothing was embedded.
#[cfg(not(feature = "embed-kernels"))]
pub(super) static BUNDLES: &[(&str, &[u8])] = &[];
