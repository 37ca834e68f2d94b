//! The families that are asked for candidates.

use qgemm_hal::{DeviceInfo, Family, Operation};

use crate::error::SchedError;

/// Families to ask: the one named `wanted`, or
/// all families when `None`.
///
/// # Errors
/// [`SchedError::UnknownFamily`] when no family has that name.
pub fn wanted_families<'f, O: Operation>(
    families: &[&'f dyn Family<O>],
    wanted: Option<&str>,
    info: &DeviceInfo,
) -> Result<Vec<&'f dyn Family<O>>, SchedError> {
    let Some(wanted) = wanted else { return Ok(families.to_vec()) };
    match families.iter().find(|family| family.name() == wanted) {
        Some(&family) => Ok(vec![family]),
        None => Err(SchedError::UnknownFamily {
            device: info.name.clone(),
            family: wanted.to_owned(),
            known: families.iter().map(|family| family.name()).collect(),
        }),
    }
}
