//! [`Operands`]: the memory that a launch reads and writes, by the names that its operation gives, and how much of what was planned
//! it is for.

use crate::buffer::{BufferMut, BufferRef};
use crate::op::Operand;

/// Most operands of an operation.
pub const MAX_OPERANDS: usize = 24;

/// The first tokens of those that were planned: a plan for many serves fewer, too, with what it launches for all.
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
    /// The first `taken` of `of` tokens; `None` where there are not so many, or none was planned.
    pub fn new(taken: usize, of: usize) -> Option<Self> {
        (of > 0 && taken <= of).then_some(Self { taken, of })
    }

    /// How many of `planned` rows it takes, of which each token has equally many.
    pub fn rows(self, planned: usize) -> usize {
        planned / self.of * self.taken
    }
}

/// Views of memory for the operands of one operation. Those that are not given are absent.
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
    /// Whether it was given as writable.
    writable: bool,
}

impl<'a> Operands<'a> {
    /// No operand is given.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the launch one for a part of the tokens that were planned, whose rows alone operands have.
    pub fn take_portion(&mut self, portion: Option<Portion>) {
        self.portion = portion;
    }

    /// The part of the tokens that the launch is for; all where there is none.
    pub fn portion(&self) -> Option<Portion> {
        self.portion
    }

    /// How many of `planned` rows the launch is for.
    pub fn rows(&self, planned: usize) -> usize {
        self.portion.map_or(planned, |portion| portion.rows(planned))
    }

    /// Gives an operand that is read.
    pub fn read(&mut self, operand: impl Operand, view: BufferRef<'a>) {
        self.views[operand.slot()] = Some(View { bytes: view, writable: false });
    }

    /// Gives an operand that is read, where there is one.
    pub fn read_if_any(&mut self, operand: impl Operand, view: Option<BufferRef<'a>>) {
        self.views[operand.slot()] = view.map(|bytes| View { bytes, writable: false });
    }

    /// Gives an operand that is written.
    pub fn write(&mut self, operand: impl Operand, view: BufferMut<'a>) {
        self.views[operand.slot()] = Some(View { bytes: view.into_ref(), writable: true });
    }

    /// The view of an operand.
    pub fn get(&self, operand: impl Operand) -> Option<BufferRef<'_>> {
        self.at(operand.slot())
    }

    /// The view of the operand at a place.
    pub fn at(&self, slot: usize) -> Option<BufferRef<'_>> {
        self.views[slot].map(|view| view.bytes)
    }

    /// The view of an operand that is read, for as long as the operands' memory is borrowed.
    pub fn take(&mut self, operand: impl Operand) -> Option<BufferRef<'a>> {
        self.views[operand.slot()].take().map(|view| view.bytes)
    }

    /// The view of an operand that is written; absent if it was given to be read, or has been taken.
    pub fn take_mut(&mut self, operand: impl Operand) -> Option<BufferMut<'a>> {
        let view = self.views[operand.slot()].take_if(|view| view.writable)?;
        Some(BufferMut::of_exclusive(view.bytes))
    }

    /// Gives the operand at a place a view, which may be written only where nothing else is lent of the same bytes.
    pub(crate) fn lend(&mut self, slot: usize, bytes: BufferRef<'a>, writable: bool) {
        self.views[slot] = Some(View { bytes, writable });
    }

    /// The view at a place, and whether it may be written.
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
