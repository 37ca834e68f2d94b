//! [`Plans`]: plans of a layer, each made once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Result};

/// Rows that a plan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rows {
    pub rows: usize,
    pub x: DType,
    pub aligned: bool,
}

/// Plans of a layer by its rows.
#[derive(Debug)]
pub(crate) struct Plans<P>(Mutex<HashMap<Rows, Arc<P>>>);

impl<P> Default for Plans<P> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<P> Plans<P> {
    /// The plan for `rows`, which `plan` makes on first use.
    pub fn get(&self, rows: Rows, plan: impl FnOnce() -> Result<P>) -> Result<Arc<P>> {
        let mut plans = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&rows) {
            return Ok(plan.clone());
        }
        let plan = Arc::new(plan()?);
        plans.insert(rows, plan.clone());
        Ok(plan)
    }
}
