//! [`Operands`]: memory views of a launch by operand, and the portion of the planned tokens that the launch covers.

use crate::buffer::{BufferMut, BufferRef};
use crate::op::Operand;

/// Maximum operands of an operation.
pub const MAX_OPERANDS: usize = 24;

/// The first tokens of a plan: a plan for many tokens
/// also runs fewer, with the same launches.
///
/// ```
/// use qgemm_hal::Portion;
///
/// let portion = Portion::new(3, 8).expect("fewer");
/// // Four slots a token.
/// assert_eq!(portion.rows(32), 12);
/// assert_eq!(Portion::new(0, 8).expect("none of them").rows(32), 0);
/// assert!(Portion::new(9, 8).is_none() && Portion::new(0, 0).is_none());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Portion {
    taken: usize,
    of: usize,
}

impl Portion {
    /// The first `taken` of `of` tokens; `None` if
    /// `taken > of`, or if `of` is 0.
    pub fn new(taken: usize, of: usize) -> Option<Self> {
        (of > 0 && taken <= of).then_some(Self { taken, of })
    }

    /// Rows of the portion, out of `planned` rows with
    /// equally many for each token.
    pub fn rows(self, planned: usize) -> usize {
        planned / self.of * self.taken
    }
}

/// Memory views for the operands of one operation. Operands
/// that are not given are absent.
///
/// ```
/// use qgemm_hal::{ConvertOperand, Operands, noop};
/// let device = noop::open("noop".parse()?)?;
/// let (x, mut d) = (device.allocate(16, "x")?, device.allocate(16, "d")?);
/// let mut operands = Operands::new();
/// operands.read(ConvertOperand::X, (&x).into());
/// operands.write(ConvertOperand::D, (&mut d).into());
/// assert!(operands.get(ConvertOperand::Order).is_none());
/// # Ok::<(), qgemm_hal::HalError>(())
/// ```
#[derive(Debug, Default)]
pub struct Operands<'a> {
    views: [Option<View<'a>>; MAX_OPERANDS],
    portion: Option<Portion>,
}

#[derive(Clone, Copy, Debug)]
struct View<'a> {
    bytes: BufferRef<'a>,
    /// Whether the view is writable.
    writable: bool,
}

impl<'a> Operands<'a> {
    /// Creates an empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Restricts the launch to a portion of the planned tokens. Operands
    /// then have only the portion's rows.
    pub fn take_portion(&mut self, portion: Option<Portion>) {
        self.portion = portion;
    }

    /// The portion of the planned tokens; `None` for all.
    pub fn portion(&self) -> Option<Portion> {
        self.portion
    }

    /// Rows of the launch, out of `planned` rows.
    pub fn rows(&self, planned: usize) -> usize {
        self.portion.map_or(planned, |portion| portion.rows(planned))
    }

    /// Sets an operand that is read.
    pub fn read(&mut self, operand: impl Operand, view: BufferRef<'a>) {
        self.views[operand.slot()] = Some(View { bytes: view, writable: false });
    }

    /// Sets an operand that is read, if `view` is given.
    pub fn read_if_any(&mut self, operand: impl Operand, view: Option<BufferRef<'a>>) {
        self.views[operand.slot()] = view.map(|bytes| View { bytes, writable: false });
    }

    /// Sets an operand that is written.
    pub fn write(&mut self, operand: impl Operand, view: BufferMut<'a>) {
        self.views[operand.slot()] = Some(View { bytes: view.into_ref(), writable: true });
    }

    /// The view of an operand.
    pub fn get(&self, operand: impl Operand) -> Option<BufferRef<'_>> {
        self.at(operand.slot())
    }

    /// The view in operand slot `slot`.
    pub fn at(&self, slot: usize) -> Option<BufferRef<'_>> {
        self.views[slot].map(|view| view.bytes)
    }

    /// Takes the view of an operand that is read, for the
    /// whole borrow of its memory.
    pub fn take(&mut self, operand: impl Operand) -> Option<BufferRef<'a>> {
        self.views[operand.slot()].take().map(|view| view.bytes)
    }

    /// Takes the view of an operand that is written. `None` when
    /// it is read-only or already taken.
    pub fn take_mut(&mut self, operand: impl Operand) -> Option<BufferMut<'a>> {
        let view = self.views[operand.slot()].take_if(|view| view.writable)?;
        Some(BufferMut::of_exclusive(view.bytes))
    }

    /// Sets a view in an operand slot. It may be written
    /// only if no other lent view shares its bytes.
    pub(crate) fn lend(&mut self, slot: usize, bytes: BufferRef<'a>, writable: bool) {
        self.views[slot] = Some(View { bytes, writable });
    }

    /// The view in an operand slot, and whether it is writable.
    pub(crate) fn view_at(&self, slot: usize) -> Option<(BufferRef<'a>, bool)> {
        self.views[slot].map(|view| (view.bytes, view.writable))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noop;
    use crate::op::convert::ConvertOperand as O;

    #[test]
    fn what_is_given_to_be_read_is_not_written() {
        let device = noop::open("noop".parse().expect("a name")).expect("always there");
        let (x, mut d) = (device.allocate(16, "x").expect("memory"), device.allocate(8, "d").expect("memory"));
        let mut operands = Operands::new();
        operands.read(O::X, (&x).into());
        operands.write(O::D, (&mut d).into());
        assert!(operands.take_mut(O::X).is_none() && operands.take_mut(O::Order).is_none());
        assert_eq!(operands.get(O::X).map(|view| view.len()), Some(16));
        assert_eq!(operands.take_mut(O::D).map(|view| view.view().len()), Some(8));
        assert!(operands.take_mut(O::D).is_none() && operands.get(O::D).is_none());
    }
}
