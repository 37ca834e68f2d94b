//! Device packers against the host's packer: every format,
//! both layouts, ragged edges.

use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{Format, HostWeight};
use qgemm_hal::{Device, Variant};

/// Random blocks, beyond those of quantizers.
fn weight(format: Format, n: usize, k: usize) -> HostWeight {
    let mut state = (n * 7919 + k) as u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let mut blocks: Vec<u8> = (0..format.row_offset(n, k)).map(|_| random()).collect();
    // Rows of a shared record hold copies of it, as from readers and quantizers.
    for plane in format.scale_planes.iter().filter(|p| p.rows > 1) {
        let (row_bytes, record) = (format.row_bytes(k), format.block_bytes - plane.bytes..format.block_bytes);
        for (row, block) in (0..n).flat_map(|row| (0..format.blocks_per_row(k)).map(move |block| (row, block))) {
            let first = row / plane.rows * plane.rows * row_bytes + block * format.block_bytes;
            let copy = blocks[first + record.start..first + record.end].to_vec();
            blocks[row * row_bytes + block * format.block_bytes..][record.clone()].copy_from_slice(&copy);
        }
    }
    if let Some(largest) = format.largest_zero_point() {
        blocks.chunks_exact_mut(format.block_bytes).for_each(|b| b[format.block_bytes - 1] %= largest);
    }
    HostWeight::new(format, n, k, blocks.into()).expect("valid")
}

/// Edge shapes: one row and block, rows beside a tile, a last
/// strip of a partial k-tile.
fn shapes(format: Format) -> Vec<(usize, usize)> {
    let block = format.block_len;
    let mut shapes = vec![(1, block), (19, 3 * block), (33, (1024 + 64usize).next_multiple_of(block))];
    if format.ragged_k {
        shapes.push((7, 2 * block + 5));
    }
    if block == 1 {
        shapes.push((5, 67));
    }
    shapes
}

fn packs_as_the_host_does(variant: Variant) {
    let test = "packs_as_the_host_does";
    let device = match qgemm_emu::open(variant.number()) {
        Ok(device) => device,
        Err(why) => return qgemm_testkit::skipped(test, &why.to_string()),
    };
    for format in Format::all() {
        let layout = PackedLayout::new(format, device.fragment_layout(format)).expect("a fragment layout");
        for (n, k) in shapes(format) {
            let weight = weight(format, n, k);
            assert_eq!(packed(&*device, &weight), layout.pack(&weight), "{format} of {n} x {k} for {variant}");
        }
    }
}

fn packed(device: &dyn Device, weight: &HostWeight) -> Vec<u8> {
    let stream = device.default_stream();
    let buffer = device.pack(&stream, weight).unwrap_or_else(|e| panic!("{}: {e}", weight.format()));
    let mut bytes = vec![0; buffer.len()];
    device.download(&stream, (&buffer).into(), &mut bytes).expect("downloads");
    bytes
}

#[test]
fn class_v_is_packed_as_the_host_does() {
    packs_as_the_host_does(Variant::Sm70);
}

#[test]
fn class_t_is_packed_as_the_host_does() {
    packs_as_the_host_does(Variant::Sm80);
}
