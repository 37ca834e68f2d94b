//! Pages of the KV cache and slots of recurrent states:
//! which are free, and which a session holds.

/// Free pages of a paged KV cache.
#[derive(Debug)]
pub struct PagePool {
    free: Vec<u32>,
}

/// Slots of recurrent states: which are free. A session
/// that runs has one.
#[derive(Debug)]
pub struct SlotPool {
    free: Vec<u32>,
}

impl SlotPool {
    /// A pool of `slots` free slots.
    pub fn new(slots: u32) -> Self {
        Self { free: (0..slots).rev().collect() }
    }

    /// Takes a slot, if one is free.
    pub fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Takes a slot back. Its state stays as it is: a
    /// sequence begins with zeros.
    pub fn release(&mut self, slot: Option<u32>) {
        self.free.extend(slot);
    }
}

/// Pages of one session, in the order of its tokens.
/// [`PagePool::release`] returns them to the pool.
#[derive(Debug, Default)]
pub struct PageTable {
    pages: Vec<u32>,
}

impl PageTable {
    /// Page numbers.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }
}

impl PagePool {
    /// A pool of `pages` free pages.
    pub fn new(pages: u32) -> Self {
        Self { free: (0..pages).rev().collect() }
    }

    /// Number of free pages.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// Gives a session `pages` pages altogether. Returns
    /// whether there were enough; if not, nothing changes.
    pub fn grow(&mut self, table: &mut PageTable, pages: usize) -> bool {
        let more = pages.saturating_sub(table.pages.len());
        let Some(rest) = self.free.len().checked_sub(more) else { return false };
        table.pages.extend(self.free.drain(rest..).rev());
        true
    }

    /// Takes the pages of a session back.
    pub fn release(&mut self, table: PageTable) {
        self.free.extend(table.pages.into_iter().rev());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Action {
        Join,
        Grow(usize, usize),
        Leave(usize),
    }

    fn actions() -> impl Strategy<Value = Vec<Action>> {
        let action = prop_oneof![
            Just(Action::Join),
            (0..8usize, 0..12usize).prop_map(|(session, pages)| Action::Grow(session, pages)),
            (0..8usize).prop_map(Action::Leave),
        ];
        prop::collection::vec(action, 0..200)
    }

    proptest! {
        #[test]
        fn no_page_is_lost_or_held_twice(actions in actions()) {
            const PAGES: u32 = 20;
            let mut pool = PagePool::new(PAGES);
            let mut sessions: Vec<PageTable> = Vec::new();
            for action in actions {
                match action {
                    Action::Join => sessions.push(PageTable::default()),
                    Action::Grow(at, pages) if at < sessions.len() => {
                        let (before, free) = (sessions[at].pages().to_vec(), pool.available());
                        let grown = pool.grow(&mut sessions[at], pages);
                        prop_assert_eq!(grown, pages.saturating_sub(before.len()) <= free);
                        prop_assert!(sessions[at].pages().starts_with(&before));
                        prop_assert_eq!(sessions[at].pages().len(), if grown { pages.max(before.len()) } else { before.len() });
                    }
                    Action::Leave(at) if at < sessions.len() => pool.release(sessions.swap_remove(at)),
                    Action::Grow(..) | Action::Leave(_) => {}
                }
                let held = sessions.iter().flat_map(|session| session.pages().iter().copied());
                let all: Vec<u32> = held.chain(pool.free.iter().copied()).collect();
                prop_assert_eq!(all.len(), PAGES as usize);
                prop_assert_eq!(all.into_iter().collect::<BTreeSet<_>>().len(), PAGES as usize);
            }
        }
    }
}
