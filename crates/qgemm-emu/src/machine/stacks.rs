//! Stacks for the threads of a CTA, reused
//! between CTAs and launches.

use std::cell::RefCell;
use std::io;

use corosensei::stack::DefaultStack;

/// Room for a kernel's frames, which hold its tiles, and
/// for the emulator's calls.
const STACK_BYTES: usize = 256 * 1024;

thread_local! {
    static FREE: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
}

/// Takes a stack with a guard page below it.
pub(super) fn take() -> io::Result<DefaultStack> {
    match FREE.with_borrow_mut(Vec::pop) {
        Some(stack) => Ok(stack),
        None => DefaultStack::new(STACK_BYTES),
    }
}

/// Returns a stack for reuse.
pub(super) fn give_back(stack: DefaultStack) {
    FREE.with_borrow_mut(|free| free.push(stack));
}
