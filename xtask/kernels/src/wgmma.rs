//! Faults of `wgmma` in machine code that the compiler accepts
//! silently. `wgmma` is asynchronous: its operand registers must
//! not be written before a wait.

use std::collections::BTreeSet;

/// One instruction of a listing: offset, and text without the predicate.
#[derive(Clone, Copy, Debug)]
pub struct Instruction<'a> {
    pub offset: usize,
    pub text: &'a str,
}

/// Matrix instructions for 16 bits, FP8 (E4M3 and
/// E5M2), and signed bytes.
const PRODUCTS: [&str; 3] = ["HGMMA", "QGMMA", "IGMMA"];

/// Faults of a kernel as text; empty without such instructions.
pub fn faults(kernel: &[Instruction<'_>]) -> Vec<String> {
    let is = |name: &'static str| move |i: &&Instruction<'_>| i.text.starts_with(name);
    let products = kernel.iter().filter(is("HGMMA")).count();
    let mut faults = Vec::new();
    // ptxas only warns (C7510 and others) and serializes: one arrival
    // and wait for each instruction.
    if products > 1 && kernel.iter().filter(is("WARPGROUP.ARRIVE")).count() >= products {
        faults.push(format!("the compiler lets {products} matrix instructions wait for each other"));
    }
    let mut flight = Flight::default();
    let mut again = BTreeSet::new();
    let mut at = 0;
    while let Some(instruction) = kernel.get(at) {
        if let Some(register) = flight.pass(instruction.text) {
            let Instruction { offset, text } = instruction;
            faults.push(format!("at {offset:#x}, `{text}` overwrites R{register}, which a matrix instruction reads"));
            break;
        }
        at += 1;
        // Repeat every loop once, with the state at its end.
        if let Some(target) = loop_begin(*instruction)
            && again.insert(instruction.offset)
        {
            at = kernel.partition_point(|i| i.offset < target);
        }
    }
    faults
}

/// Target of a backward branch.
fn loop_begin(instruction: Instruction<'_>) -> Option<usize> {
    let target = instruction.text.strip_prefix("BRA")?.split_whitespace().find_map(|word| word.strip_prefix("0x"))?;
    usize::from_str_radix(target, 16).ok().filter(|&target| target <= instruction.offset)
}

/// Registers that matrix instructions in flight read.
#[derive(Default)]
struct Flight {
    /// Registers of committed groups, oldest first.
    groups: Vec<BTreeSet<u32>>,
    /// Registers of the open group.
    open: BTreeSet<u32>,
}

impl Flight {
    /// Processes an instruction. Returns a register that it
    /// must not write, if it does.
    fn pass(&mut self, text: &str) -> Option<u32> {
        let (opcode, operands) = text.split_once(' ').unwrap_or((text, ""));
        let mut operands = operands.split(',').map(str::trim);
        if PRODUCTS.iter().any(|product| opcode.starts_with(product)) {
            if let Some(first) = operands.nth(1).and_then(register) {
                self.open.extend(first..first + 4);
            }
            // An instruction that ends a group names its scoreboard.
            if text.contains("gsb0") {
                self.groups.push(std::mem::take(&mut self.open));
            }
            return None;
        }
        if opcode.starts_with("WARPGROUP.DEPBAR") {
            let left = operands.nth(1).and_then(|n| n.strip_prefix("0x")?.parse::<usize>().ok()).unwrap_or(0);
            self.groups.drain(..self.groups.len().saturating_sub(left));
            return None;
        }
        let first = register(operands.next()?)?;
        let count = match opcode {
            o if o.contains(".128") => 4,
            o if o.contains(".64") || o.contains(".WIDE") || o.starts_with("CS2R") => 2,
            _ => 1,
        };
        (first..first + count).find(|r| self.open.contains(r) || self.groups.iter().any(|group| group.contains(r)))
    }
}

/// Number of a register that forms a whole operand.
fn register(operand: &str) -> Option<u32> {
    operand.strip_prefix('R')?.trim_end_matches(".reuse").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults_of(texts: &[&str]) -> Vec<String> {
        let kernel: Vec<_> = texts.iter().enumerate().map(|(i, text)| Instruction { offset: i * 16, text }).collect();
        faults(&kernel)
    }

    #[test]
    fn operands_are_not_overwritten_before_the_wait() {
        let multiply = [
            "WARPGROUP.ARRIVE",
            "HGMMA.64x32x16.F32 R24, R40, gdesc[UR4], R24",
            "HGMMA R24, R44, gdesc[UR4], R24, gsb0",
        ];
        let wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0";
        let with = |rest: &[&'static str]| faults_of(&[&multiply, rest].concat());
        assert!(with(&["STS [R41], R42", "ISETP.NE.AND P0, PT, R41, RZ, PT", "HMUL2 R48, R40, R41"]).is_empty());
        assert!(with(&[wait, "HMUL2 R41, R41, R47"]).is_empty());
        for bad in ["HMUL2 R41, R41, R47", "LDS.128 R44, [R2]", "LDS.64 R39, [R2]", "IMAD.WIDE.U32 R46, R1, R2, RZ"] {
            let found = with(&[bad, wait]);
            assert!(found.len() == 1 && found[0].contains(bad), "{found:?}");
        }
    }

    #[test]
    fn operands_of_every_kind_are_watched() {
        for product in PRODUCTS {
            let multiply = format!("{product}.64x128x32 R24, R40, gdesc[UR4], R24, gsb0");
            assert_eq!(faults_of(&[&multiply, "MOV R43, R1"]).len(), 1);
            // An operand A in shared memory has no registers.
            let multiply = format!("{product}.64x128x32 R24, gdesc[UR4], R24, gsb0");
            assert!(faults_of(&[&multiply, "MOV R43, R1"]).is_empty());
        }
    }

    #[test]
    fn a_wait_may_leave_the_last_groups() {
        let texts = [
            "HGMMA.64x8x16.F32 R24, R40, gdesc[UR4], R24, gsb0",
            "HGMMA.64x8x16.F32 R24, R44, gdesc[UR4], R24, gsb0",
            "WARPGROUP.DEPBAR.LE gsb0, 0x1",
            "MOV R40, R1",
        ];
        assert!(faults_of(&texts).is_empty());
        assert_eq!(faults_of(&[&texts[..3], &["MOV R45, R1"]].concat()).len(), 1);
    }

    #[test]
    fn a_loop_is_followed_back_to_its_beginning() {
        let of_next_round = ["MOV R44, R1", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "HGMMA R24, R44, gdesc[UR4], R24, gsb0"];
        assert!(faults_of(&of_next_round).is_empty());
        assert_eq!(faults_of(&[&of_next_round[..], &["BRA 0x0", "EXIT"]].concat()).len(), 1);
    }

    #[test]
    fn instructions_that_wait_for_each_other_are_a_fault() {
        let one = ["WARPGROUP.ARRIVE", "HGMMA R24, R44, gdesc[UR4], R24, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0"];
        assert!(faults_of(&one).is_empty());
        assert_eq!(faults_of(&[one, one].concat()).len(), 1);
    }
}
