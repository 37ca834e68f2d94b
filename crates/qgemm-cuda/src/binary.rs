//! Little-endian records of bundles and cache entries.

use crate::hash::Sha256Hash;

/// Appends fields to a byte vector.
#[derive(Default)]
pub(crate) struct Writer {
    pub(crate) bytes: Vec<u8>,
}

impl Writer {
    pub(crate) fn u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn hash(&mut self, hash: Sha256Hash) {
        self.bytes.extend_from_slice(&hash.0);
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.u32(text.len() as u32);
        self.bytes.extend_from_slice(text.as_bytes());
    }
}

/// Reads fields from bytes; `None` when they end
/// early or are not text.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    pub(crate) fn hash(&mut self) -> Option<Sha256Hash> {
        Some(Sha256Hash(self.take(32)?.try_into().ok()?))
    }

    pub(crate) fn text(&mut self) -> Option<&'a str> {
        let len = self.u32()?;
        std::str::from_utf8(self.take(usize::try_from(len).ok()?)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_round_trip_and_short_input_is_none() {
        let mut writer = Writer::default();
        writer.u32(7);
        writer.u64(1 << 40);
        writer.text("sm_90a");
        writer.hash(Sha256Hash::of(b""));
        let read = |bytes| {
            let mut r = Reader(bytes);
            Some((r.u32()?, r.u64()?, r.text()?.to_owned(), r.hash()?))
        };
        assert_eq!(read(&writer.bytes), Some((7, 1 << 40, "sm_90a".into(), Sha256Hash::of(b""))));
        for len in 0..writer.bytes.len() {
            assert_eq!(read(&writer.bytes[..len]), None, "{len}");
        }
        assert!(Reader(&[0xff; 16]).text().is_none());
    }
}
