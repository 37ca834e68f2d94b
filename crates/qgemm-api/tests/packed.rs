//! Packed weights: written and loaded again,
//! they give the same bits.

use qgemm_api::{
    Activation, Context, DType, Error, Format, FragmentLayout, HostWeight, NO_COLUMN, PackedWeight, Problem,
    SharedBytes, XPrecision, open_packed,
};

const N: usize = 37;

/// Round trip through the bytes of a file.
fn written_and_read(packed: &PackedWeight) -> PackedWeight {
    let mut bytes = Vec::new();
    packed.write(&mut bytes).expect("memory");
    PackedWeight::read(&SharedBytes::from(bytes)).expect("as written")
}

/// Weights of every format, and one with row
/// scales and a column order.
fn weights() -> Vec<HostWeight> {
    let every = Format::all().map(|format| {
        let kind = qgemm_testkit::WeightKind::Raw;
        qgemm_testkit::weight(kind, format, N, 2 * format.block_len.max(32), None, 7).expect("K suits")
    });
    let order = (0..60).rev().chain([NO_COLUMN; 4]).collect();
    let format: Format = "int8_g32".parse().expect("a format");
    let blocks = (0..format.row_offset(N, 64)).map(|i| (i % 60) as u8).collect::<Vec<u8>>();
    let permuted = HostWeight::with_k_order(format, N, 60, blocks.into(), order).expect("valid");
    every.chain([permuted.with_row_scale(vec![0.25; N]).expect("finite")]).collect()
}

#[test]
fn a_weight_that_was_written_and_loaded_again_gives_the_same_bits() {
    let ctx = Context::open("cpu").expect("always there");
    for host in weights() {
        let weight = ctx.load(&host).expect("memory");
        let again =
            ctx.load_packed(&written_and_read(&ctx.download_packed(&weight).expect("memory"))).expect("the same");
        assert_eq!((again.bytes(), again.fits_f16()), (weight.bytes(), weight.fits_f16()), "{}", host.format());
        let x: Vec<f32> = (0..3 * host.k()).map(|i| (i % 11) as f32 - 5.0).collect();
        let bits = |w| -> Vec<u32> {
            ctx.linear(w, &x, 3, XPrecision::Auto).expect("valid").iter().map(|v| v.to_bits()).collect()
        };
        assert_eq!(bits(&again), bits(&weight), "{}", host.format());
    }
}

#[test]
fn what_the_processor_packed_serves_wgpu() {
    let wgpu = match Context::open("wgpu:0") {
        Ok(wgpu) => wgpu,
        Err(error) => return qgemm_testkit::skipped("packed weights on wgpu:0", &error.to_string()),
    };
    let cpu = Context::open("cpu").expect("always there");
    let all = weights();
    // Two planes and super-blocks; a column order with row scales.
    let [q6_k, permuted] = [all.iter().find(|w| w.format().name == "q6_k"), all.last()].map(|w| w.expect("there"));
    for host in [q6_k, permuted] {
        let packed = written_and_read(&PackedWeight::pack(host, FragmentLayout::Simd16).expect("fits"));
        // The CPU quantizes them without loss: every block contains 127.
        let value = |i: usize| if (i % host.k()).is_multiple_of(32) { 127.0 } else { (i % 11) as f32 - 5.0 };
        let x: Vec<f32> = (0..3 * host.k()).map(value).collect();
        let product = |ctx: &Context| {
            ctx.linear(&ctx.load_packed(&packed).expect("its layout"), &x, 3, XPrecision::Auto).expect("valid")
        };
        let (ours, theirs) = (product(&wgpu), product(&cpu));
        let largest = theirs.iter().fold(0.0f32, |most, v| most.max(v.abs()));
        let off = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off <= 1e-5 * largest, "{}: {off} of {largest}", host.format());
        let back = wgpu.download_packed(&wgpu.load(host).expect("memory")).expect("memory");
        assert!(*back.data == *packed.data, "{}: other bytes than the processor's", host.format());
    }
}

#[test]
fn a_gated_pair_that_was_written_and_loaded_again_is_one() {
    let ctx = Context::open("cpu").expect("always there");
    let host = &weights()[0];
    let pair = ctx.load_gated(host, host).expect("alike");
    let held = ctx.download_packed(&pair).expect("memory");
    let again = ctx.load_packed(&written_and_read(&held)).expect("the same");
    assert_eq!((again.n(), again.k(), again.is_gated()), (N, host.k(), true));
    let packed = PackedWeight::pack_gated(host, host, held.class).expect("alike");
    assert!(*packed.data == *held.data);
    let op = |w| ctx.plan(&Problem::new(w, 1).activation(Activation::Silu)).expect("valid").op().clone();
    assert_eq!(op(&again), op(&pair));
}

/// Device and host packers agree, so that files can be
/// made without the device.
#[test]
fn the_host_packs_what_a_device_would_hold() {
    let ctx = Context::open("cpu").expect("always there");
    for host in weights() {
        let held = ctx.download_packed(&ctx.load(&host).expect("memory")).expect("memory");
        let packed = PackedWeight::pack(&host, held.class).expect("small");
        assert!(*packed.data == *held.data && packed.row_scale.as_deref() == held.row_scale.as_deref());
        assert_eq!(packed.k_order.as_deref(), held.k_order.as_deref(), "{}", host.format());
    }
}

#[test]
fn a_layout_that_the_device_does_not_read_is_refused() {
    let ctx = Context::open("cpu").expect("always there");
    let packed = PackedWeight::pack(&weights()[0], FragmentLayout::MmaM8N8K4).expect("small");
    let error = ctx.load_packed(&packed).expect_err("another layout");
    assert!(
        matches!(error, Error::WrongLayout { expected: FragmentLayout::Simd16, got: FragmentLayout::MmaM8N8K4, .. }),
        "{error}"
    );
}

#[test]
fn a_weight_of_another_device_is_not_downloaded() {
    let (cpu, noop) = (Context::open("cpu").expect("there"), Context::open("noop").expect("there"));
    let values = DType::F32.encode(&[1.0; 64]);
    let weight = noop.load_dense(&values, DType::F32, 2, 32, Default::default()).expect("memory");
    assert!(matches!(cpu.download_packed(&weight), Err(Error::WrongDevice { operand: "weight", .. })));
}

#[test]
fn a_file_that_is_missing_or_foreign_is_an_error() {
    let folder = tempfile::tempdir().expect("a writable folder");
    assert!(matches!(open_packed(folder.path().join("none")), Err(Error::Hal(_))));
    let foreign = folder.path().join("foreign");
    std::fs::write(&foreign, b"GGUF of some length").expect("writable");
    let error = open_packed(&foreign).expect_err("no packed weight");
    let Error::NotPacked { path, source } = &error else { panic!("{error}") };
    assert!(*path == foreign && source.to_string().contains("GGUF of "), "{error}: {source}");
}
