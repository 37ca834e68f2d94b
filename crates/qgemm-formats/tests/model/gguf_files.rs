//! GGUF files: writer and reader round trips, and errors for broken files.

use half::f16;
use qgemm_formats::model::NumberType;
use qgemm_formats::model::gguf::{GgufArray, GgufFile, GgufHeader, GgufScalar, GgufValue};
use qgemm_formats::model::{Model, TensorKind};
use qgemm_formats::{Format, FormatError, SharedBytes};

fn format(name: &str) -> Format {
    name.parse().expect("a format")
}

fn all_values() -> Vec<(&'static str, GgufValue)> {
    let scalars = |kind, bytes: &[u8]| GgufArray::Scalars { kind, bytes: bytes.to_vec().into() };
    vec![
        ("general.architecture", "llama".into()),
        ("u8", GgufScalar::U8(255).into()),
        ("i8", GgufScalar::I8(-128).into()),
        ("u16", GgufScalar::U16(65535).into()),
        ("i16", GgufScalar::I16(-32768).into()),
        ("u32", 7u32.into()),
        ("i32", GgufScalar::I32(i32::MIN).into()),
        ("f32", GgufScalar::F32(1.5e-7).into()),
        ("bool", GgufScalar::Bool(true).into()),
        ("u64", GgufScalar::U64(u64::MAX).into()),
        ("i64", GgufScalar::I64(i64::MIN).into()),
        ("f64", GgufScalar::F64(1e-300).into()),
        ("text", "Blöcke".into()),
        ("i16s", GgufValue::Array(scalars(3, &[1, 0, 0xff, 0xff]))),
        ("tokens", GgufValue::Array(GgufArray::Strings(vec!["a".into(), String::new(), "ß".into()]))),
        ("no UTF-8", GgufValue::ByteString(b"caf\xe9".to_vec())),
        ("raw tokens", GgufValue::Array(GgufArray::ByteStrings(vec![b"a".to_vec(), vec![], b"\xf0\x9f".to_vec()]))),
        ("nested", GgufValue::Array(GgufArray::Arrays(vec![scalars(0, &[]), GgufArray::Strings(vec!["x".into()])]))),
    ]
}

/// One tensor per GGUF format: two rows of two blocks (or 8 values).
fn sample(alignment: Option<u32>) -> (Vec<u8>, Vec<(Format, Vec<u8>)>) {
    let mut header = GgufHeader::new();
    for (key, value) in all_values() {
        header.metadata(key, value).expect("new key");
    }
    if let Some(alignment) = alignment {
        header.metadata("general.alignment", alignment.into()).expect("new key");
    }
    let mut contents = Vec::new();
    for format in Format::all().filter(|f| f.ggml_type.is_some()) {
        let k = (format.block_len * 2).max(8);
        let size = header.tensor(&format!("t.{format}.weight"), &[2, k], format).expect("fits");
        // Small bytes keep every scale finite.
        contents.push((format, (0..size).map(|i| (i % 50) as u8).collect::<Vec<u8>>()));
    }
    let mut writer = header.write(Vec::new()).expect("writes");
    for (_, bytes) in &contents {
        writer.tensor(bytes).expect("in order");
    }
    (writer.finish().expect("complete"), contents)
}

fn read(bytes: Vec<u8>) -> Result<GgufFile, FormatError> {
    GgufFile::read(&bytes.into())
}

#[test]
fn what_is_written_is_read() {
    for alignment in [None, Some(8), Some(64), Some(4096)] {
        let (bytes, contents) = sample(alignment);
        let file = read(bytes.clone()).expect("reads");
        assert_eq!((file.version, file.alignment), (3, alignment.unwrap_or(32) as usize));
        for (key, value) in all_values() {
            assert_eq!(file.value(key), Some(&value), "{key}");
        }
        let Some(GgufValue::Array(array)) = file.value("i16s") else { panic!("an array") };
        assert_eq!((array.len(), array.scalar(1), array.scalar(2)), (2, Some(GgufScalar::I16(-1)), None));

        let model = Model::from_bytes(bytes.into(), None, Default::default()).expect("opens");
        assert_eq!(model.tensors().len(), contents.len());
        for (format, bytes) in &contents {
            let name = format!("t.{format}");
            let weight = model.weight(&name).expect("loads");
            assert_eq!((weight.format(), weight.n(), weight.blocks()), (*format, 2, bytes.as_slice()));
            assert_eq!(model.info(&name).expect("listed").shape, [2, weight.k()]);
        }
    }
}

#[test]
fn strings_that_are_not_utf_8_are_kept_as_bytes() {
    let raw = Raw::new(3, 0, 2).text("one").u32(8).bytes(b"\xff\xfe").text("all").u32(9).u32(8).u64(2);
    let file = read(raw.bytes(b"fine").bytes(b"\x80").0).expect("reads");
    assert_eq!(file.value("one"), Some(&GgufValue::ByteString(b"\xff\xfe".to_vec())));
    assert_eq!(file.value("one").and_then(GgufValue::as_str), None);
    let Some(GgufValue::Array(GgufArray::ByteStrings(items))) = file.value("all") else { panic!("strings") };
    assert_eq!(items, &[b"fine".to_vec(), b"\x80".to_vec()]);
}

#[test]
fn stacks_and_vectors() {
    let q8_0 = format("q8_0");
    let mut header = GgufHeader::new();
    let size = header.tensor("experts.weight", &[3, 2, 32], q8_0).expect("fits");
    header.tensor("norm.weight", &[4], format("f16")).expect("fits");
    let mut writer = header.write(Vec::new()).expect("writes");
    let bytes: Vec<u8> = (0..size).map(|i| (i / 34) as u8).collect();
    writer.tensor(&bytes).expect("fits");
    let norm: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect();
    writer.tensor(&norm).expect("fits");
    let model = Model::from_bytes(writer.finish().expect("complete").into(), None, Default::default()).expect("opens");
    assert_eq!(&*model.blocks("experts").expect("quantized"), bytes);
    assert!(matches!(model.blocks("norm"), Err(FormatError::UnsupportedFile { .. })));
    for expert in 0..3 {
        assert_eq!(model.stacked_weight("experts", expert).expect("loads").blocks(), &bytes[expert * 68..][..68]);
    }
    let experts = model.experts("experts").expect("a stack");
    assert_eq!((experts.experts(), experts.n(), experts.k()), (3, 2, 32));
    let pitch = experts.row_pitch() * 34;
    assert_eq!(&experts.stacked().blocks()[2 * pitch..2 * pitch + 68], &bytes[2 * 68..]);
    assert!(model.gated_experts("experts", "experts").expect("pairs").is_gated());
    assert!(matches!(model.experts("absent"), Err(FormatError::NoSuchTensor { .. })));
    assert!(model.stacked_weight("experts", 3).is_err() && model.weight("experts").is_err());
    assert_eq!(model.dense("norm").expect("dense").to_f32(), [1.0, 2.0, 3.0, 4.0]);
    assert!(matches!(model.dense("experts"), Err(FormatError::UnsupportedFile { .. })));
}

#[test]
fn the_writer_checks_what_it_is_given() {
    let mut header = GgufHeader::new();
    header.metadata("a", 1u32.into()).expect("new");
    assert!(matches!(header.metadata("a", 1u32.into()), Err(FormatError::BadFile { .. })));
    assert!(matches!(header.metadata("general.alignment", 48u32.into()), Err(FormatError::BadFile { .. })));
    header.tensor("t", &[1, 32], format("q4_0")).expect("fits");
    assert!(matches!(header.tensor("t", &[1, 32], format("q4_0")), Err(FormatError::BadFile { .. })));
    assert!(matches!(header.tensor("u", &[1, 33], format("q4_0")), Err(FormatError::KNotMultiple { .. })));
    assert!(matches!(header.tensor("v", &[1 << 40, 1 << 40], format("q4_0")), Err(FormatError::Overflow { .. })));
    assert!(matches!(header.tensor("x", &[0, 1 << 40, 1 << 40], format("f32")), Err(FormatError::Overflow { .. })));
    assert!(matches!(header.tensor("w", &[1, 128], format("int4_g128")), Err(FormatError::UnsupportedFile { .. })));
    let mut writer = header.write(Vec::new()).expect("writes");
    assert!(matches!(writer.tensor(&[0; 17]), Err(FormatError::WrongLength { expected: 18, got: 17, .. })));
    writer.tensor(&[0; 18]).expect("fits");
    assert!(matches!(writer.tensor(&[]), Err(FormatError::BadFile { .. })));
}

/// File built field by field.
#[derive(Default)]
struct Raw(Vec<u8>);

impl Raw {
    fn new(version: u32, tensors: u64, pairs: u64) -> Self {
        Self(b"GGUF".to_vec()).u32(version).u64(tensors).u64(pairs)
    }

    fn u32(mut self, v: u32) -> Self {
        self.0.extend(v.to_le_bytes());
        self
    }

    fn u64(mut self, v: u64) -> Self {
        self.0.extend(v.to_le_bytes());
        self
    }

    fn bytes(self, bytes: &[u8]) -> Self {
        let mut raw = self.u64(bytes.len() as u64);
        raw.0.extend(bytes);
        raw
    }

    fn text(self, text: &str) -> Self {
        self.bytes(text.as_bytes())
    }

    fn tensor(self, name: &str, dims: &[u64], ggml_type: u32, offset: u64) -> Self {
        let raw = self.text(name).u32(dims.len() as u32);
        dims.iter().fold(raw, |raw, &d| raw.u64(d)).u32(ggml_type).u64(offset)
    }

    fn data(mut self, bytes: usize) -> Self {
        self.0.resize(self.0.len().next_multiple_of(32) + bytes, 0);
        self
    }
}

#[test]
fn broken_files_are_refused_with_the_reason() {
    let cases = [
        (Raw(b"GGUX0000".to_vec()), "does not begin"),
        (Raw(b"GGUF".to_vec()), "version"),
        (Raw::new(1, 0, 0), "version 1"),
        (Raw::new(4, 0, 0), "version 4"),
        (Raw::new(3u32.swap_bytes(), 0, 0), "big-endian"),
        (Raw::new(3, u64::MAX, 0), "tensor count"),
        (Raw::new(3, 0, 1 << 60), "metadata count"),
        (Raw::new(3, 0, 1).u64(u64::MAX).u64(0), "metadata key"),
        (Raw::new(3, 0, 1).text("key").u32(13).u64(0), "unknown type 13"),
        (Raw::new(3, 0, 1).text("key").u32(9).u32(4).u64(1 << 62), "key is 4611686018427387904"),
        (
            Raw::new(3, 0, 1).text("k").u32(9).u32(9).u64(1).u32(9).u64(1).u32(9).u64(1).u32(9).u64(1).u32(0).u64(0),
            "nests",
        ),
        (Raw::new(3, 0, 2).text("k").u32(4).u32(1).text("k").u32(4).u32(1), "comes twice"),
        (Raw::new(3, 0, 1).text("split.count").u32(4).u32(3), "one of 3 parts"),
        (Raw::new(3, 0, 1).text("general.alignment").u32(4).u32(0), "power of two"),
        (Raw::new(3, 0, 1).text("general.alignment").u32(8).text("32"), "power of two"),
        (Raw::new(3, 1, 0).tensor("t", &[32, 1, 1, 1, 1], 2, 0).data(18), "5 dimensions"),
        (Raw::new(3, 1, 0).tensor("t", &[33, 1], 2, 0).data(64), "no multiple"),
        (Raw::new(3, 1, 0).tensor("t", &[1 << 40, 1 << 40], 2, 0).data(18), "overflows"),
        (Raw::new(3, 1, 0).tensor("t", &[1 << 62], 0, 0).data(18), "overflows"),
        // The product of all dimensions is 0, but that of some overflows.
        (Raw::new(3, 1, 0).tensor("t", &[0, 1 << 40, 1 << 40], 2, 0).data(18), "overflows"),
        (Raw::new(3, 1, 0).tensor("t", &[1 << 40, 0, 1 << 40], 2, 0).data(18), "overflows"),
        (Raw::new(3, 1, 0).tensor("t", &[1 << 40, 1 << 40, 0], 2, 0).data(18), "overflows"),
        (Raw::new(3, 1, 0).tensor("t", &[1 << 40, 1 << 40, 0], 9999, 0).data(18), "overflows"),
        (Raw::new(3, 0, 1).bytes(b"k\xff").u32(4).u32(1), "metadata key is not UTF-8"),
        (Raw::new(3, 1, 0).bytes(b"t\xff").u32(1).u64(8).u32(0).u64(0).data(32), "tensor name is not UTF-8"),
        (Raw::new(3, 1, 0).tensor("t", &[32, 1], 2, 0).data(17), "holds 17 bytes"),
        (Raw::new(3, 1, 0).tensor("t", &[32, 1], 2, 32).data(18), "at offset 32"),
        (Raw::new(3, 1, 0).tensor("t", &[32, 1], 2, u64::MAX - 31).data(18), "holds 18 bytes"),
        (Raw::new(3, 1, 0).tensor("t", &[32, 1], 2, 8).data(64), "no multiple of 32"),
        (Raw::new(3, 2, 0).tensor("t", &[8], 0, 0).tensor("t", &[8], 0, 32).data(64), "comes twice"),
        (Raw::new(3, 2, 0).tensor("t", &[9], 0, 0).tensor("u", &[8], 0, 32).data(64), "overlap"),
        (Raw::new(3, 2, 0).tensor("t", &[8], 0, 0).tensor("u", &[8], 0, 0).data(64), "overlap"),
        (Raw::new(3, 1, 0).tensor("t", &[8], 0, 0), "within its header"),
    ];
    for (raw, reason) in cases {
        let error = read(raw.0).expect_err(reason).to_string();
        assert!(error.contains(reason), "expected `{reason}` in `{error}`");
    }
}

#[test]
fn every_truncation_is_refused() {
    let (bytes, contents) = sample(None);
    // Padding after the last tensor is optional, its data is not.
    let end = bytes.len()
        - (contents.last().expect("tensors").1.len().next_multiple_of(32) - contents.last().expect("tensors").1.len());
    assert!(read(bytes[..end].to_vec()).is_ok());
    let shared = SharedBytes::from(bytes);
    for length in 0..end {
        assert!(GgufFile::read(&shared.slice(0..length).expect("a part")).is_err(), "{length} of {end} bytes");
    }
}

#[test]
fn version_2_and_unknown_types_are_read() {
    let raw = Raw::new(2, 3, 1).text("split.count").u32(2).u32(0x0000_0001).0;
    // `split.count` is a u16 in real files: two bytes follow the type.
    let mut raw = Raw(raw[..raw.len() - 2].to_vec());
    raw =
        raw.tensor("odd", &[10, 3], 9999, 0).tensor("known", &[32, 1], 8, 64).tensor("bits", &[256], 41, 128).data(200);
    let model = Model::from_bytes(raw.0.into(), None, Default::default()).expect("opens");
    let kinds: Vec<_> = model.tensors().iter().map(|t| (t.kind.clone(), t.bytes)).collect();
    assert_eq!(kinds[0], (TensorKind::Opaque("type 9999".into()), 64));
    assert_eq!(kinds[1], (TensorKind::Quantized(format("q8_0")), 34));
    let refused = "tensor `bits`: is Q1_0 of shape [256]: expected a matrix";
    assert_eq!(kinds[2], (TensorKind::Opaque(refused.into()), 72));
    assert_eq!(model.info("odd").expect("listed").shape, [3, 10]);
    for (name, kind) in [("bits", "is Q1_0 "), ("odd", "is type 9999,")] {
        let error = model.weight(name).expect_err("opaque").to_string();
        assert!(error.contains(kind), "{error}");
    }
}

#[test]
fn infinite_scales_are_found_in_every_format() {
    for format in Format::all().filter(|f| f.ggml_type.is_some() && !f.float_scales.is_empty()) {
        for scale in format.float_scales {
            let (n, k) = (3, format.block_len * 4);
            let mut header = GgufHeader::new();
            let size = header.tensor("w", &[n, k], format).expect("fits");
            let mut bytes = vec![0u8; size];
            let at = format.row_offset(2, k) + format.block_bytes + scale.offset;
            bytes[at..at + 2].fill(0xff);
            let mut writer = header.write(Vec::new()).expect("writes");
            writer.tensor(&bytes).expect("fits");
            let model = Model::from_bytes(writer.finish().expect("complete").into(), None, Default::default());
            let error = model.expect("opens").weight("w").expect_err("refused");
            assert_eq!(error, FormatError::NonFiniteScale { what: "w".into(), row: 2, block: 1 }, "{format}");
        }
    }
}

#[test]
fn names_that_ggml_cannot_hold_are_refused() {
    let mut header = GgufHeader::new();
    assert_eq!(header.tensor(&"n".repeat(63), &[32], format("f32")), Ok(128));
    let name = "w".repeat(64);
    let error = header.tensor(&name, &[32], format("f32")).expect_err("too long").to_string();
    assert!(error.contains(&name) && error.contains("63"), "{error}");
    // Two bytes per letter.
    assert!(header.tensor(&"é".repeat(32), &[32], format("f32")).is_err());
}

#[test]
fn integers_are_copied() {
    let mut header = GgufHeader::new();
    let ids: Vec<u8> = (0..3i64).flat_map(i64::to_le_bytes).collect();
    assert_eq!(header.numbers("ids", &[3], NumberType::I64), Ok(24));
    assert_eq!(header.numbers("mask", &[1, 5], NumberType::I8), Ok(5));
    let mut writer = header.write(Vec::new()).expect("writes");
    writer.tensor(&ids).expect("fits");
    writer.tensor(&[1, 0, 1, 0, 1]).expect("fits");
    let model = Model::from_bytes(writer.finish().expect("complete").into(), None, Default::default()).expect("opens");
    // The reader's slice may extend to the next tensor's offset;
    // the tensor itself does not.
    for (name, kind, bytes) in [("ids", NumberType::I64, &ids[..]), ("mask", NumberType::I8, &[1, 0, 1, 0, 1])] {
        let tensor = model.numbers(name).expect("there").expect("of numbers");
        assert_eq!((tensor.kind, &*tensor.bytes), (kind, bytes));
        assert!(matches!(model.dense(name), Err(FormatError::UnsupportedFile { .. })));
    }
}

#[test]
fn names_cannot_act_on_a_terminal() {
    let name = "a\x1b[31m\u{202e}";
    let mut header = GgufHeader::new();
    header.tensor(name, &[32], format("f32")).expect("valid");
    let twice = header.tensor(name, &[32], format("f32")).expect_err("twice").to_string();
    let mut writer = header.write(Vec::new()).expect("writes");
    writer.tensor(&[0; 128]).expect("fits");
    let model = Model::from_bytes(writer.finish().expect("complete").into(), None, Default::default()).expect("opens");
    assert_eq!(model.tensors()[0].name, name, "the name itself stays");
    let no_matrix = model.weight(name).expect_err("one dimension").to_string();
    let near = model.weight("a\x1b[31m").expect_err("no such tensor").to_string();
    for error in [twice, no_matrix, near] {
        assert!(error.contains("\\u{1b}[31m") && !error.contains('\x1b') && !error.contains('\u{202e}'), "{error}");
    }
}
