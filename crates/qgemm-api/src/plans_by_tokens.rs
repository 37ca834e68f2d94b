//! [`PlansByTokens`]: what a layer has planned, found without a lock.

use std::ops::Deref;
use std::sync::OnceLock;

/// Numbers of tokens that have a place of their own, from 0 on: all batches of a decoder.
const OWN_PLACES: usize = 257;
/// Places that greater numbers share.
pub(crate) const SHARED_PLACES: usize = 2048;
/// Places that one of these may take.
const PROBES: usize = 8;

/// A plan.
pub(crate) enum Found<'a, P> {
    Kept(&'a P),
    /// There is no place for it.
    Passing(Box<P>),
}

impl<P> Deref for Found<'_, P> {
    type Target = P;

    fn deref(&self) -> &P {
        match self {
            Self::Kept(plan) => plan,
            Self::Passing(plan) => plan,
        }
    }
}

/// A place that several numbers of tokens may take: which one did, and its plan.
type SharedPlace<P> = OnceLock<(usize, Box<P>)>;

/// The plans of one layer by their tokens. A place that is filled stays so, which is why it can be read without a lock.
pub(crate) struct PlansByTokens<P> {
    own: Box<[OnceLock<Box<P>>]>,
    shared: Box<[SharedPlace<P>]>,
}

impl<P> PlansByTokens<P> {
    /// None yet.
    pub fn new() -> Self {
        Self {
            own: (0..OWN_PLACES).map(|_| OnceLock::new()).collect(),
            shared: (0..SHARED_PLACES).map(|_| OnceLock::new()).collect(),
        }
    }

    /// The places that `m` may take of those that are shared, in turn. Neighbours lie apart.
    fn places(&self, m: usize) -> impl Iterator<Item = &SharedPlace<P>> {
        let first = m.wrapping_mul(8 * PROBES + 1);
        (0..PROBES).map(move |i| &self.shared[first.wrapping_add(i) % SHARED_PLACES])
    }

    /// The plan for `m` tokens, if there is one.
    pub fn get(&self, m: usize) -> Option<&P> {
        if let Some(place) = self.own.get(m) {
            return place.get().map(|plan| &**plan);
        }
        // They are filled in turn: behind one that is free there is nothing.
        let mut filled = self.places(m).map_while(OnceLock::get);
        filled.find(|(of, _)| *of == m).map(|(_, plan)| &**plan)
    }

    /// Keeps `plan` unless there is one by now or no place for it.
    pub fn keep(&self, m: usize, plan: P) -> Found<'_, P> {
        let plan = Box::new(plan);
        if let Some(place) = self.own.get(m) {
            return Found::Kept(place.get_or_init(|| plan));
        }
        let mut entry = Some((m, plan));
        for place in self.places(m) {
            let (of, kept) = place.get_or_init(|| entry.take().unwrap_or_else(|| unreachable!("it is kept once")));
            if *of == m {
                return Found::Kept(kept);
            }
        }
        let (_, plan) = entry.unwrap_or_else(|| unreachable!("what is kept is of this m"));
        Found::Passing(plan)
    }
}
