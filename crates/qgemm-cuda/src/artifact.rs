//! [`Artifact`]: a compiled kernel with the compiler's resource report.

use crate::binary::{Reader, Writer};
use crate::target::Target;

/// Resources of a kernel, as reported by `ptxas`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Spilled bytes per thread (stores plus loads).
    pub spill_bytes: u32,
    /// Stack bytes per thread.
    pub stack_bytes: u32,
    /// Static shared memory of a CTA in bytes.
    pub shared_bytes: u32,
}

/// A compiled kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// Compilation target.
    pub target: Target,
    /// NVRTC version that compiled it: `12.9`.
    pub nvrtc: String,
    /// Resources; `None` for PTX.
    pub resources: Option<Resources>,
    /// The cubin, or zero-terminated PTX.
    pub image: Vec<u8>,
}

impl Resources {
    /// Parses the compiler's log (`--ptxas-options=-v`).
    pub(crate) fn from_log(log: &str) -> Self {
        let before = |what: &str| log.match_indices(what).filter_map(|(at, _)| last_number(&log[..at])).sum::<u32>();
        Self {
            registers: before(" registers"),
            spill_bytes: before(" bytes spill stores") + before(" bytes spill loads"),
            stack_bytes: before(" bytes stack frame"),
            shared_bytes: before(" bytes smem"),
        }
    }

    pub(crate) fn write(self, writer: &mut Writer) {
        for value in [self.registers, self.spill_bytes, self.stack_bytes, self.shared_bytes] {
            writer.u32(value);
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            registers: reader.u32()?,
            spill_bytes: reader.u32()?,
            stack_bytes: reader.u32()?,
            shared_bytes: reader.u32()?,
        })
    }
}

/// The decimal number at the end of `text`.
fn last_number(text: &str) -> Option<u32> {
    let digits = text.len() - text.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    text[text.len() - digits..].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_read_from_the_log() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'f' for 'sm_90'\n\
                   ptxas info    : Function properties for f\n\
                   \x20   64 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n\
                   ptxas info    : Used 127 registers, used 1 barriers, 64 bytes cumulative stack size, 16384 bytes smem\n";
        let expected = Resources { registers: 127, spill_bytes: 32, stack_bytes: 64, shared_bytes: 16384 };
        assert_eq!(Resources::from_log(log), expected);
        assert_eq!(Resources::from_log(""), Resources::default());
    }
}
