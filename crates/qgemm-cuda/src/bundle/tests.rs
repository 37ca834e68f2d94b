//! Bundle tests: round trips and damage.

use super::write::FRAME_BYTES;
use super::*;
use crate::jit::tests::probe;

pub(super) fn kernel(prelude: &str, target: &str) -> (KernelSpec, Artifact) {
    let artifact = Artifact {
        target: target.parse().unwrap(),
        nvrtc: "12.9".into(),
        resources: Some(Resources { registers: 32, ..Default::default() }),
        image: format!("{prelude} for {target}").repeat(20).into_bytes(),
    };
    (probe(prelude), artifact)
}

pub(super) fn write(folder: &Path, target: &str, kernels: &[(KernelSpec, Artifact)]) -> PathBuf {
    let path = folder.join(format!("{target}.{EXTENSION}"));
    let len = Bundle::write(&path, target.parse().unwrap(), "12.9", kernels).unwrap();
    assert_eq!(len, path.metadata().unwrap().len());
    path
}

/// Length of common fragments, and their number.
const FRAGMENT_BYTES: usize = 256;
const FRAGMENTS: usize = 240;

/// Similar kernels that fill two frames.
fn relatives(target: &str) -> Vec<(KernelSpec, Artifact)> {
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 16
    };
    let fragments: Vec<Vec<u8>> = (0..64).map(|_| (0..FRAGMENT_BYTES).map(|_| random() as u8).collect()).collect();
    let relative = |i| {
        let (spec, artifact) = kernel(&format!("kernel {i}"), target);
        let image = (0..FRAGMENTS).flat_map(|_| fragments[random() as usize % fragments.len()].clone()).collect();
        (spec, Artifact { image, ..artifact })
    };
    (0..2 * FRAME_BYTES / (FRAGMENTS * FRAGMENT_BYTES)).map(relative).collect()
}

/// Edits the header of the bundle `bytes` and updates its hash.
fn edit_header(bytes: &mut [u8], edit: impl FnOnce(&mut [u8])) {
    let prefix = Prefix::parse(bytes[..PREFIX_BYTES].try_into().unwrap()).unwrap();
    let (header, rest) = bytes[PREFIX_BYTES..].split_at_mut(prefix.header as usize);
    edit(header);
    rest[..32].copy_from_slice(&Sha256Hash::of(header).0);
}

/// Overwrites a field of `frame` in the header,
/// `at` bytes from its hash.
fn forge(bytes: &[u8], frame: &Frame, at: isize, value: &[u8]) -> Vec<u8> {
    let mut forged = bytes.to_vec();
    edit_header(&mut forged, |header| {
        let hash = header.windows(32).position(|window| window == frame.hash.0).unwrap();
        header[hash.strict_add_signed(at)..][..value.len()].copy_from_slice(value);
    });
    forged
}
const STORED_LEN: isize = -8;
const HASH: isize = 0;
const LEN: isize = 32;

#[test]
fn kernels_round_trip() {
    let folder = tempfile::tempdir().unwrap();
    let kernels = [kernel("A", "sm_90"), kernel("B", "sm_90a")];
    let path = write(folder.path(), "sm_90", &kernels);
    let program: &[u8] = std::fs::read(&path).unwrap().leak();
    for bundle in [Bundle::open(&path).unwrap(), Bundle::of_program("sm_90.qgk", program).unwrap()] {
        assert_eq!((bundle.target().to_string().as_str(), bundle.len()), ("sm_90", 2));
        for (spec, artifact) in &kernels {
            assert_eq!(bundle.read(spec, 90).unwrap().as_ref(), Some(artifact));
        }
        assert_eq!(bundle.read(&probe("C"), 90).unwrap(), None);
        assert_eq!(bundle.read(&kernels[0].0, 80).unwrap(), None, "another chip");
    }
}

#[test]
fn images_are_compressed() {
    let folder = tempfile::tempdir().unwrap();
    let (spec, artifact) = kernel("A", "sm_90");
    let big = Artifact { image: artifact.image.repeat(1000), ..artifact };
    let path = write(folder.path(), "sm_90", &[(spec.clone(), big.clone())]);
    assert!(path.metadata().unwrap().len() < big.image.len() as u64 / 20);
    assert_eq!(Bundle::open(&path).unwrap().read(&spec, 90).unwrap(), Some(big));
}

#[test]
fn ptx_round_trips() {
    let folder = tempfile::tempdir().unwrap();
    let (spec, artifact) = kernel("A", "compute_80");
    let lines = (0..500).map(|i| format!("\tadd.s32 \t%r{}, %r{}, %r{};\n", i + 2, i + 1, i / 2));
    let image = [lines.collect::<String>().as_bytes(), b"\xff\0"].concat();
    let ptx = Artifact { image, resources: None, ..artifact };
    let path = write(folder.path(), "compute_80", &[(spec.clone(), ptx.clone())]);
    let bundle = Bundle::open(&path).unwrap();
    assert_eq!(bundle.read(&spec, 120).unwrap(), Some(ptx));
    assert!(bundle.frames[0].stored < 500, "{:?}", bundle.frames[0]);
}

#[test]
fn what_kernels_share_is_stored_once_and_they_are_read_in_any_order() {
    let folder = tempfile::tempdir().unwrap();
    let kernels = relatives("sm_90");
    let path = write(folder.path(), "sm_90", &kernels);
    let alone = write(&folder.path().join("alone"), "sm_90", &kernels[..1]);
    let bundle = Bundle::open(&path).unwrap();
    assert!(bundle.dictionary.len > 0);
    let (together, alone) = (path.metadata().unwrap().len(), alone.metadata().unwrap().len());
    assert!(together < alone * kernels.len() as u64 / 8, "{together} bytes, one kernel alone {alone}");
    std::thread::scope(|scope| {
        for stride in [1, 37, 63] {
            let (bundle, kernels) = (&bundle, &kernels);
            scope.spawn(move || {
                for (spec, artifact) in (0..kernels.len()).map(|i| &kernels[i * stride % kernels.len()]) {
                    assert_eq!(bundle.read(spec, 90).unwrap().as_ref(), Some(artifact));
                }
            });
        }
    });
    let empty = write(&folder.path().join("empty"), "sm_90", &[]);
    assert!(Bundle::open(&empty).unwrap().is_empty());
}

#[test]
fn reading_a_kernel_reads_its_frame_alone_and_keeps_it() {
    let folder = tempfile::tempdir().unwrap();
    let kernels = relatives("sm_90");
    let path = write(folder.path(), "sm_90", &kernels);
    let bundle = Bundle::open(&path).unwrap();
    let span = |frame: &Frame| frame.offset as usize..(frame.offset + frame.stored) as usize;
    // An open bundle keeps only the dictionary and one frame.
    let wanted = 41;
    let bytes = std::fs::read(&path).unwrap();
    let frame = bundle.entries[wanted].frame;
    let own = span(&bundle.frames[frame]);
    let mut left = vec![0; own.end];
    for kept in [span(&bundle.dictionary), own] {
        left[kept.clone()].copy_from_slice(&bytes[kept]);
    }
    std::fs::write(&path, left).unwrap();
    let (spec, artifact) = &kernels[wanted];
    assert_eq!(bundle.read(spec, 90).unwrap().as_ref(), Some(artifact));
    // The dictionary is read for the first kernel only.
    assert!(bundle.stored(&bundle.dictionary, Part::Dictionary).is_ok());
    let mut file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    io::Seek::seek(&mut file, SeekFrom::Start(bundle.dictionary.offset)).unwrap();
    io::Write::write_all(&mut file, &[0; 16]).unwrap();
    assert!(bundle.stored(&bundle.dictionary, Part::Dictionary).is_err());
    assert_eq!(bundle.read(spec, 90).unwrap().as_ref(), Some(artifact));
    let neighbours = bundle.entries.iter().zip(&kernels).filter(|(entry, _)| entry.frame == frame).count();
    assert!(neighbours > 1 && neighbours < kernels.len(), "{neighbours} kernels in the frame");
    for (entry, (spec, artifact)) in bundle.entries.iter().zip(&kernels) {
        match bundle.read(spec, 90) {
            Ok(read) => assert_eq!((entry.frame, read.as_ref()), (frame, Some(artifact))),
            Err(error) => assert_ne!(entry.frame, frame, "{error}"),
        }
    }
}

#[test]
fn damaged_kernels_are_refused_and_those_of_other_frames_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let kernels = relatives("sm_90");
    let path = write(folder.path(), "sm_90", &kernels);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[Bundle::open(&path).unwrap().frames[1].offset as usize] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let bundle = Bundle::open(&path).unwrap();
    for (entry, (spec, artifact)) in bundle.entries.iter().zip(&kernels) {
        match bundle.read(spec, 90) {
            Err(BundleError::Damaged { what, .. }) if entry.frame == 1 => assert_eq!(what, "wrong checksum of kernels"),
            read => assert_eq!(read.unwrap().as_ref(), Some(artifact)),
        }
    }
}

#[test]
fn a_damaged_dictionary_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let kernels = relatives("sm_90");
    let path = write(folder.path(), "sm_90", &kernels);
    let good = std::fs::read(&path).unwrap();
    let dictionary = Bundle::open(&path).unwrap().dictionary;
    let span = dictionary.offset as usize..(dictionary.offset + dictionary.stored) as usize;
    let read = |bytes: Vec<u8>| Bundle::of_program("A", bytes.leak()).unwrap().read(&kernels[0].0, 90);
    for at in span.clone().step_by(span.len() / 100) {
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        let error = read(bad.clone()).unwrap_err();
        assert_eq!(error.to_string(), "embedded A: damaged: wrong checksum of the dictionary");
        // With a corrected checksum, the result is an error, or the kernel if
        // the byte is irrelevant.
        let hash = Sha256Hash::of(&bad[span.clone()]);
        match read(forge(&bad, &dictionary, HASH, &hash.0)) {
            Ok(kernel) => assert_eq!(kernel.as_ref(), Some(&kernels[0].1), "byte {at}"),
            Err(error) => assert!(matches!(error, BundleError::Damaged { .. }), "byte {at}: {error}"),
        }
    }
}

/// Ranges of the entry of `spec` in a header: key, bytes before the
/// image range, image range, check.
fn entry_of(header: &[u8], spec: &KernelSpec) -> [Range<usize>; 4] {
    let key = half(spec.key());
    let start = header.windows(key.len()).position(|window| window == key).unwrap();
    let mut rest = Reader(&header[start + key.len()..]);
    let place = |rest: &Reader<'_>| header.len() - rest.0.len();
    let _name_and_target = [rest.text().unwrap(), rest.text().unwrap()];
    let _resources = (rest.u32().unwrap(), Resources::read(&mut rest).unwrap());
    let image = place(&rest);
    let check = image + 4 + 8 + 8;
    [start..start + key.len(), start + key.len()..image, image..check, check..check + key.len()]
}

#[test]
fn a_forged_header_gives_no_kernel_the_image_of_another() {
    let folder = tempfile::tempdir().unwrap();
    for target in ["sm_90", "compute_80"] {
        let kernels = [kernel("A", target), kernel("B", target), kernel("C", target)];
        let good = std::fs::read(write(folder.path(), target, &kernels)).unwrap();
        let [a, b, c] = &kernels;
        type Edit = fn(&mut [u8], [Range<usize>; 4], [Range<usize>; 4]);
        let edits: [(&str, Edit); 5] = [
            ("the place of B's image", |bytes, a, b| bytes.copy_within(b[2].clone(), a[2].start)),
            ("B's image and its check", |bytes, a, b| bytes.copy_within(b[2].start..b[3].end, a[2].start)),
            ("B's check", |bytes, a, b| bytes.copy_within(b[3].clone(), a[3].start)),
            ("a longer image", |bytes, a, _| bytes[a[2].start + 12] ^= 1),
            ("more registers", |bytes, a, _| bytes[a[2].start - 16] ^= 1),
        ];
        for (what, edit) in edits {
            let mut forged = good.clone();
            edit_header(&mut forged, |header| edit(header, entry_of(header, &a.0), entry_of(header, &b.0)));
            let bundle = Bundle::of_program("A", forged.leak()).unwrap();
            let error = bundle.read(&a.0, 90).expect_err(what);
            assert!(matches!(&error, BundleError::Damaged { .. }), "{what}: {error}");
            assert_eq!(bundle.read(&c.0, 90).unwrap().as_ref(), Some(&c.1), "{what}: C is as it was");
        }
        // With exchanged keys, two kernels would get each other's image.
        let mut swapped = good.clone();
        edit_header(&mut swapped, |header| {
            let ([a, ..], [b, ..]) = (entry_of(header, &a.0), entry_of(header, &b.0));
            let key = header[a.clone()].to_vec();
            header.copy_within(b.clone(), a.start);
            header[b].copy_from_slice(&key);
        });
        let bundle = Bundle::of_program("A", swapped.leak()).unwrap();
        for (spec, _) in [a, b] {
            assert!(matches!(bundle.read(spec, 90), Err(BundleError::Damaged { .. })));
        }
        assert_eq!(bundle.read(&c.0, 90).unwrap().as_ref(), Some(&c.1));
    }
}

#[test]
fn a_byte_of_one_image_spoils_that_kernel_alone_and_the_next_bundle_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let kernels = [kernel("A", "sm_90"), kernel("B", "sm_90")];
    let good = std::fs::read(write(folder.path(), "sm_90", &kernels)).unwrap();
    // Another image with matching hashes, but the check of the old image.
    let mut damaged = kernels.clone();
    damaged[0].1.image[7] ^= 1;
    let path = write(&folder.path().join("damaged"), "sm_90", &damaged);
    let mut bytes = std::fs::read(&path).unwrap();
    edit_header(&mut bytes, |header| {
        let ([.., before], [.., place]) =
            (entry_of(&good[PREFIX_BYTES..], &kernels[0].0), entry_of(header, &kernels[0].0));
        header[place].copy_from_slice(&good[PREFIX_BYTES..][before]);
    });
    std::fs::write(&path, &bytes).unwrap();
    let bundle = Bundle::open(&path).unwrap();
    assert!(matches!(bundle.read(&kernels[0].0, 90), Err(BundleError::Damaged { .. })));
    assert_eq!(bundle.read(&kernels[1].0, 90).unwrap().as_ref(), Some(&kernels[1].1));
    let alone = Bundles::at([path.clone()].into_iter(), 90);
    assert_eq!(alone.find(&kernels[0].0, 90), None);
    let both = Bundles::at([path, folder.path().join("sm_90.qgk")].into_iter(), 90);
    assert_eq!(both.find(&kernels[0].0, 90).as_ref(), Some(&kernels[0].1));
}

#[test]
fn lengths_that_are_not_true_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let kernels = relatives("sm_90");
    let path = write(folder.path(), "sm_90", &kernels);
    let good = std::fs::read(&path).unwrap();
    let bundle = Bundle::open(&path).unwrap();
    for (part, frame) in [(Part::Dictionary, &bundle.dictionary), (Part::Kernels, &bundle.frames[0])] {
        let read = |at, value: u64| {
            let bytes = forge(&good, frame, at, &value.to_le_bytes());
            Bundle::of_program("A", bytes.leak()).and_then(|bundle| bundle.read(&kernels[0].0, 90)).unwrap_err()
        };
        for len in [part.limit() + 1, u64::MAX] {
            let error = read(LEN, len);
            assert!(matches!(error, BundleError::TooLarge { got, .. } if got == len), "{error}");
            let (name, limit) = (part.name(), part.limit());
            let expected = format!("embedded A: {name} of {len} bytes, expected at most {limit}");
            assert_eq!(error.to_string(), expected);
        }
        for (at, value) in [
            (LEN, frame.len - 1),
            (LEN, frame.len + 1),
            (LEN, part.limit()),
            (LEN, 0),
            (STORED_LEN, frame.stored - 1),
            (STORED_LEN, u64::MAX),
        ] {
            let error = read(at, value);
            assert!(matches!(error, BundleError::Damaged { .. }), "{part:?}, {value} at {at}: {error}");
        }
    }
    let (spec, artifact) = kernels[0].clone();
    let image = vec![0; Part::Kernels.limit() as usize + 1];
    let error = Bundle::write(&path, artifact.target, "12.9", &[(spec, Artifact { image, ..artifact })]).unwrap_err();
    assert!(matches!(error, BundleError::TooLarge { .. }), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), good, "what was there before");
}

#[test]
fn a_bundle_of_other_sources_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "sm_90", &[kernel("A", "sm_90")]);
    let mut bytes = std::fs::read(&path).unwrap();
    edit_header(&mut bytes, |header| header[0] ^= 1);
    std::fs::write(&path, bytes).unwrap();
    assert!(matches!(Bundle::open(&path), Err(BundleError::OtherSources { .. })));
    let bundles = Bundles::at([path].into_iter(), 90);
    assert_eq!(bundles.find(&probe("A"), 90), None);
    assert!(bundles.refused()[0].contains("build it again"), "{:?}", bundles.refused());
}

#[test]
fn a_bundle_of_another_version_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "sm_90", &[kernel("A", "sm_90")]);
    let good = std::fs::read(&path).unwrap();
    for version in [1u32, FORMAT_VERSION - 1, FORMAT_VERSION + 1] {
        let mut bytes = good.clone();
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        let error = Bundle::open(&path).unwrap_err();
        assert!(matches!(error, BundleError::OtherVersion { got, .. } if got == version), "{error}");
        assert!(error.to_string().contains("build it again"), "{error}");
    }
}

#[test]
fn damage_is_found_wherever_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "sm_90", &[kernel("A", "sm_90")]);
    let good = std::fs::read(&path).unwrap();
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let from_file = Bundle::open(&path).and_then(|b| b.read(&probe("A"), 90));
        let from_program = Bundle::of_program("A", bytes.to_vec().leak()).and_then(|b| b.read(&probe("A"), 90));
        assert_eq!(from_file.as_ref().ok(), from_program.as_ref().ok());
        from_file
    };
    assert!(read(&good).unwrap().is_some());
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        let refused = match read(&bad) {
            Err(BundleError::Damaged { .. }) => true,
            // No checksum covers the version field.
            Err(BundleError::OtherVersion { .. }) => (8..12).contains(&at),
            _ => false,
        };
        assert!(refused, "byte {at}");
    }
    for len in 0..good.len() {
        assert!(matches!(read(&good[..len]), Err(BundleError::Damaged { .. })), "cut to {len}");
    }
}

#[test]
fn a_place_that_cannot_be_written_is_an_error_with_its_name() {
    // A file instead of the folder fails for every user, even root.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, b"").unwrap();
    let path = file.join("sm_90.qgk");
    let error = Bundle::write(&path, "sm_90".parse().unwrap(), "12.9", &[kernel("A", "sm_90")]).unwrap_err();
    assert!(error.to_string().contains("sm_90.qgk: "), "{error}");
}
