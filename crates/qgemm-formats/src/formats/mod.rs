//! One file a format (or a family of formats that differ by a parameter); [`ALL`] is the registry.

pub mod q4_0;

use crate::desc::FormatDesc;

/// Every format, in the order of tables.
pub static ALL: &[&FormatDesc] = &[&q4_0::Q4_0];
