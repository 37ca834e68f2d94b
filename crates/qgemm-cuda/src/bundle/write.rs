//! Bundle writer. It uses the encoder in C, which trains dictionaries and
//! compresses better than those in Rust.

use std::borrow::Cow;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{panic, thread};

use zstd::bulk::Compressor;

use super::frame::{Frame, Part};
use super::layout::{FORMAT_VERSION, MAGIC};
use super::{Bundle, BundleError, check, half, registers};
use crate::artifact::Artifact;
use crate::binary::Writer;
use crate::hash::Sha256Hash;
use crate::spec::KernelSpec;
use crate::target::Target;
use crate::{replace, source};

/// Compression level. Higher levels save nothing.
const LEVEL: i32 = 19;
/// Kernel bytes per dictionary byte. A larger dictionary would
/// cost more than it saves.
const BYTES_PER_DICTIONARY_BYTE: usize = 32;
/// Maximum bytes of kernels per frame, which are decompressed together.
pub(super) const FRAME_BYTES: usize = 4 << 20;

impl Bundle {
    /// Writes the bundle of `target` to `path` atomically: a failed or interrupted
    /// write keeps the old file. Returns the file's length.
    ///
    /// # Errors
    /// [`BundleError::Io`], and [`BundleError::TooLarge`] for a kernel
    /// that could not be read back.
    pub fn write(
        path: &Path,
        target: Target,
        nvrtc: &str,
        kernels: &[(KernelSpec, Artifact)],
    ) -> Result<u64, BundleError> {
        let io = |error| BundleError::Io { path: path.to_path_buf(), error };
        let contents: Vec<Cow<'_, [u8]>> = kernels.iter().map(|(_, artifact)| contents(artifact)).collect();
        contents.iter().try_for_each(|contents| Part::Kernels.check(contents.len() as u64, path))?;
        let dictionary = dictionary(&contents);
        let stored_dictionary = compress(&[], std::slice::from_ref(&dictionary)).map_err(io)?.concat();
        let shared = share_frames(kernels, &contents);
        let together: Vec<Vec<u8>> = shared
            .iter()
            .map(|members| members.iter().flat_map(|&at| contents[at].iter().copied()).collect())
            .collect();
        let images = compress(&dictionary, &together).map_err(io)?;

        let mut end = 0;
        let mut frame = |stored: &[u8], contents: &[u8]| {
            let (offset, stored_len) = (end, stored.len() as u64);
            end += stored_len;
            Frame { offset, stored: stored_len, hash: Sha256Hash::of(stored), len: contents.len() as u64 }
        };
        let mut header = Writer::default();
        header.hash(source::source_hash());
        header.text(nvrtc);
        header.text(&target.to_string());
        frame(&stored_dictionary, &dictionary).write(&mut header);
        header.u32(images.len() as u32);
        images.iter().zip(&together).for_each(|(image, together)| frame(image, together).write(&mut header));
        header.u32(kernels.len() as u32);
        for (place, members) in shared.iter().enumerate() {
            let mut offset = 0;
            for &at in members {
                let ((spec, artifact), len) = (&kernels[at], contents[at].len() as u64);
                header.bytes.extend_from_slice(&half(spec.key()));
                header.text(&spec.name);
                header.text(&artifact.target.to_string());
                header.u32(u32::from(artifact.resources.is_some()));
                artifact.resources.unwrap_or_default().write(&mut header);
                header.u32(place as u32);
                header.u64(offset);
                header.u64(len);
                header.bytes.extend_from_slice(&check(spec.key(), artifact));
                offset += len;
            }
        }
        let mut head = Writer::default();
        head.bytes.extend_from_slice(MAGIC);
        head.u32(FORMAT_VERSION);
        head.u32(header.bytes.len() as u32);
        head.u64(end);
        head.bytes.extend_from_slice(&header.bytes);
        head.hash(Sha256Hash::of(&header.bytes));
        replace::durably(path, |file| {
            file.write_all(&head.bytes)?;
            file.write_all(&stored_dictionary)?;
            images.iter().try_for_each(|image| file.write_all(image))
        })
        .map_err(io)?;
        Ok(head.bytes.len() as u64 + end)
    }
}

/// Bytes of a kernel to compress.
fn contents(artifact: &Artifact) -> Cow<'_, [u8]> {
    match artifact.target.is_ptx() {
        true => Cow::Owned(registers::pack(&artifact.image)),
        false => Cow::Borrowed(&artifact.image),
    }
}

/// Kernels per frame. Similar kernels have similar names, so
/// they are sorted by name.
fn share_frames(kernels: &[(KernelSpec, Artifact)], contents: &[Cow<'_, [u8]>]) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..kernels.len()).collect();
    order.sort_by_key(|&at| &kernels[at].0.name);
    let mut frames: Vec<Vec<usize>> = Vec::new();
    let mut len = 0;
    for at in order {
        match frames.last_mut() {
            Some(members) if len + contents[at].len() <= FRAME_BYTES => members.push(at),
            _ => {
                frames.push(vec![at]);
                len = 0;
            }
        }
        len += contents[at].len();
    }
    frames
}

/// Trained dictionary. Empty when kernels are too few or too small.
fn dictionary(contents: &[Cow<'_, [u8]>]) -> Vec<u8> {
    let len: usize = contents.iter().map(|contents| contents.len()).sum();
    let most = Part::Dictionary.limit() as usize;
    zstd::dict::from_samples(contents, most.min(len / BYTES_PER_DICTIONARY_BYTE)).unwrap_or_default()
}

/// Compresses each of `contents` to a frame, on all processors.
fn compress(dictionary: &[u8], contents: &[Vec<u8>]) -> io::Result<Vec<Vec<u8>>> {
    let next = AtomicUsize::new(0);
    let work = || -> io::Result<Vec<(usize, Vec<u8>)>> {
        let mut compressor = Compressor::with_dictionary(LEVEL, dictionary)?;
        let mut frames = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(contents) = contents.get(at) else { return Ok(frames) };
            frames.push((at, compressor.compress(contents)?));
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(contents.len());
    let mut frames = Vec::new();
    thread::scope(|scope| -> io::Result<()> {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            frames.extend(worker.join().unwrap_or_else(|panic| panic::resume_unwind(panic))?);
        }
        Ok(())
    })?;
    frames.sort_unstable_by_key(|(at, _)| *at);
    Ok(frames.into_iter().map(|(_, frame)| frame).collect())
}
