//! Lock-free plan cache of a layer, by number of tokens ([`PlansByTokens`]).

use std::ops::Deref;
use std::sync::OnceLock;

/// Token counts with their own slot, from 0: all decode batch sizes.
const OWN_SLOTS: usize = 257;
/// Slots shared by larger token counts.
pub(crate) const SHARED_SLOTS: usize = 2048;
/// Slots that one larger token count may use.
const PROBES: usize = 8;

/// Plan of the cache, or a temporary one.
pub(crate) enum Found<'a, P> {
    Kept(&'a P),
    /// Plan without a free slot.
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

/// Shared slot: the token count that owns it, and its plan.
type SharedSlot<P> = OnceLock<(usize, Box<P>)>;

/// Plans of one layer by token count. A filled slot never
/// changes, so reads need no lock.
pub(crate) struct PlansByTokens<P> {
    own: Box<[OnceLock<Box<P>>]>,
    shared: Box<[SharedSlot<P>]>,
}

impl<P> PlansByTokens<P> {
    /// Empty cache.
    pub fn new() -> Self {
        Self {
            own: (0..OWN_SLOTS).map(|_| OnceLock::new()).collect(),
            shared: (0..SHARED_SLOTS).map(|_| OnceLock::new()).collect(),
        }
    }

    /// Probe sequence of `m` in the shared slots. Neighbouring counts are far apart.
    fn slots(&self, m: usize) -> impl Iterator<Item = &SharedSlot<P>> {
        let first = m.wrapping_mul(8 * PROBES + 1);
        (0..PROBES).map(move |i| &self.shared[first.wrapping_add(i) % SHARED_SLOTS])
    }

    /// Cached plan for `m` tokens.
    pub fn get(&self, m: usize) -> Option<&P> {
        if let Some(slot) = self.own.get(m) {
            return slot.get().map(|plan| &**plan);
        }
        // Slots fill in probe order, so the first free one ends the search.
        let mut filled = self.slots(m).map_while(OnceLock::get);
        filled.find(|(of, _)| *of == m).map(|(_, plan)| &**plan)
    }

    /// Caches `plan`, unless another thread did or no slot is free.
    pub fn keep(&self, m: usize, plan: P) -> Found<'_, P> {
        let plan = Box::new(plan);
        if let Some(slot) = self.own.get(m) {
            return Found::Kept(slot.get_or_init(|| plan));
        }
        let mut entry = Some((m, plan));
        for slot in self.slots(m) {
            let (of, kept) = slot.get_or_init(|| entry.take().unwrap_or_else(|| unreachable!("it is kept once")));
            if *of == m {
                return Found::Kept(kept);
            }
        }
        let (_, plan) = entry.unwrap_or_else(|| unreachable!("what is kept is of this m"));
        Found::Passing(plan)
    }
}
