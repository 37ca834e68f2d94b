//! PTX transformation for compression: register numbers become distances.
//!
//! The compiler numbers registers in order of creation, so equal instructions
//! have different numbers in each kernel and repetition. Distances are equal,
//! and compress nearly twice as well.
//!
//! A register such as `%r123` becomes a byte for its class and a distance.
//! The distance is from the last register of that class that came first on
//! a line: the one defined by the instruction there. It is zigzag-encoded,
//! seven bits a byte, low bits first. Non-ASCII bytes follow an escape;
//! other bytes are unchanged.

/// Register classes.
const CLASSES: [&str; 6] = ["p", "rs", "r", "rd", "f", "fd"];
/// Byte of the first class. The others follow.
const FIRST: u8 = 0x80;
const ESCAPE: u8 = FIRST + CLASSES.len() as u8;
/// Bytes of a distance between two 32-bit numbers.
const MAX_DISTANCE_BYTES: usize = 5;

/// Reference registers of distances.
struct Defined {
    numbers: [u32; CLASSES.len()],
    /// Whether the next register is the first on its line.
    is_next: bool,
}

impl Defined {
    fn none() -> Self {
        Self { numbers: [0; CLASSES.len()], is_next: true }
    }

    fn saw(&mut self, class: usize, number: u32) {
        if self.is_next {
            self.numbers[class] = number;
        }
        self.is_next = false;
    }
}

/// Transforms `text`, which may be any bytes.
#[cfg(any(test, feature = "write-bundles"))]
pub(super) fn pack(text: &[u8]) -> Vec<u8> {
    let mut packed = Vec::with_capacity(text.len());
    let mut defined = Defined::none();
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        if let Some((class, number, after)) = register(rest) {
            packed.push(FIRST + class as u8);
            let distance = i64::from(number) - i64::from(defined.numbers[class]);
            push_distance(&mut packed, ((distance << 1) ^ (distance >> 63)) as u64);
            defined.saw(class, number);
            rest = after;
            continue;
        }
        if byte >= FIRST {
            packed.push(ESCAPE);
        }
        defined.is_next |= byte == b'\n';
        packed.push(byte);
        rest = after;
    }
    packed
}

/// Register at the start of `text`: class, number, and the remaining text.
/// Numbers that would print differently are text.
#[cfg(any(test, feature = "write-bundles"))]
fn register(text: &[u8]) -> Option<(usize, u32, &[u8])> {
    let rest = text.strip_prefix(b"%")?;
    let (name, rest) = rest.split_at(rest.iter().position(|b| !b.is_ascii_lowercase())?);
    let class = CLASSES.iter().position(|c| c.as_bytes() == name)?;
    let digits = rest.iter().position(|b| !b.is_ascii_digit()).unwrap_or(rest.len());
    let (digits, rest) = rest.split_at(digits);
    if digits.len() > 1 && digits[0] == b'0' {
        return None;
    }
    Some((class, std::str::from_utf8(digits).ok()?.parse().ok()?, rest))
}

#[cfg(any(test, feature = "write-bundles"))]
fn push_distance(packed: &mut Vec<u8>, mut distance: u64) {
    while distance >= 0x80 {
        packed.push(distance as u8 | 0x80);
        distance >>= 7;
    }
    packed.push(distance as u8);
}

/// Inverse of [`pack`], at most seven times as long. `None` when damaged.
pub(super) fn unpack(packed: &[u8]) -> Option<Vec<u8>> {
    let mut text = Vec::with_capacity(packed.len() + packed.len() / 4);
    let mut defined = Defined::none();
    let mut rest = packed;
    loop {
        let (plain, after) = rest.split_at(rest.iter().position(|&b| b >= FIRST).unwrap_or(rest.len()));
        text.extend_from_slice(plain);
        defined.is_next |= plain.contains(&b'\n');
        let Some((&token, after)) = after.split_first() else { return Some(text) };
        if token == ESCAPE {
            let (&byte, after) = after.split_first()?;
            text.push(byte);
            rest = after;
            continue;
        }
        let class = usize::from(token - FIRST);
        let name = CLASSES.get(class)?;
        let (distance, after) = take_distance(after)?;
        let number = i64::from(defined.numbers[class]) + ((distance >> 1) as i64 ^ -((distance & 1) as i64));
        let number = u32::try_from(number).ok()?;
        text.push(b'%');
        text.extend_from_slice(name.as_bytes());
        push_number(&mut text, number);
        defined.saw(class, number);
        rest = after;
    }
}

fn take_distance(packed: &[u8]) -> Option<(u64, &[u8])> {
    let mut distance = 0;
    for (i, &byte) in packed.iter().take(MAX_DISTANCE_BYTES).enumerate() {
        distance |= u64::from(byte & 0x7f) << (7 * i);
        if byte < 0x80 {
            return Some((distance, &packed[i + 1..]));
        }
    }
    None
}

/// Appends decimal digits. Formatting would cost three times
/// as much as all else here.
fn push_number(text: &mut Vec<u8>, mut number: u32) {
    let mut digits = [0; 10];
    let mut first = digits.len();
    loop {
        first -= 1;
        digits[first] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    text.extend_from_slice(&digits[first..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_round_trip() {
        let all: Vec<u8> = (0..=255).collect();
        let texts: [&[u8]; 9] = [
            b"",
            b"%",
            b"%r",
            b"\tadd.s32 \t%r12, %r3, %rd4294967295;\n\tfma %fd0, %f7, %f1, %p2;\n%rs65535\0",
            b"%r4294967295 %r0\n%r0 %r4294967295",
            b"%r007 %r4294967296 %r99999999999999999999 %rx1 %h5 %retval0 %tid.x .reg .b32 %r<1395>;",
            b"%%r1%p%f2",
            "π %r1 ü".as_bytes(),
            &all,
        ];
        for text in texts {
            assert_eq!(unpack(&pack(text)).as_deref(), Some(text), "{}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn the_same_instructions_are_alike_wherever_they_stand() {
        let repetition = |n: u32| pack(format!("\tadd %r{}, %r{}, %f{n};\n", n + 2, n + 1).as_bytes()).len();
        let one = |n: u32| format!("\tadd %r{}, %r{}, 1;\n", n + 2, n + 1);
        let packed = pack([one(1000), one(1001), one(1002)].concat().as_bytes());
        let lines: Vec<&[u8]> = packed.split(|&b| b == b'\n').collect();
        assert_eq!(lines[1], lines[2]);
        assert!(repetition(70_000) < one(70_000).len());
    }

    #[test]
    fn damage_is_found_or_stays_within_bounds() {
        let packed = pack(b"\tadd.s32 \t%r12, %r3, %rd4294967295;\n\xffend");
        assert_eq!(unpack(&packed[..packed.len() - 4]), None, "cut after an escape");
        assert_eq!(unpack(&[FIRST]), None, "no distance");
        assert_eq!(unpack(&[FIRST, 1]), None, "below the first register");
        assert_eq!(unpack(&[FIRST, 0xff, 0xff, 0xff, 0xff, 0x7f]), None, "above the last");
        assert_eq!(unpack(&[FIRST, 0x80, 0x80, 0x80, 0x80, 0x80, 0]), None, "a distance that is too long");
        assert_eq!(unpack(&[ESCAPE + 1, 0]), None, "no class");
        for at in 0..packed.len() {
            for value in 0..=255 {
                let mut bad = packed.clone();
                bad[at] = value;
                assert!(unpack(&bad).is_none_or(|text| text.len() <= 7 * bad.len()));
            }
        }
    }
}
