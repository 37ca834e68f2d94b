//! One-shot all-reduce: ranks in turn on one emulated GPU. The
//! packets of a rank that has not run yet are written by the
//! test, and compared with what it sends.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_cuda::KernelSpec;
use qgemm_emu::{Access, Geometry, Region, device_address, launch_spec};
use qgemm_formats::DType;
use qgemm_hal::{Buffer, Device, HalError, Variant};

const MOST_RANKS: usize = 8;
const THREADS: usize = 256;
/// Packets of a slot.
const PACKETS: usize = 512;
const PACKET_BYTES: usize = 16;
/// Longest wait: a second.
const LIMIT: u64 = 1_000_000_000;

/// `OneShotParams` of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Params {
    d: u64,
    count: u64,
    slots: [u64; MOST_RANKS],
    calls: u64,
    failed: u64,
    host: u64,
    limit: u64,
    dtype: u32,
    rank: u32,
    ranks: u32,
    packets: u32,
}

/// Memory of a rank.
struct Rank {
    slots: Buffer,
    calls: Buffer,
    failed: Buffer,
    host: Buffer,
}

struct Group {
    device: Arc<dyn Device>,
    spec: KernelSpec,
    ranks: Vec<Rank>,
}

fn group(test: &str, variant: Variant, world: usize) -> Option<Group> {
    let device = match qgemm_emu::open(variant.number()) {
        Ok(device) => device,
        Err(why @ HalError::NoDevice { .. }) => {
            qgemm_testkit::skipped(test, &why.to_string());
            return None;
        }
        Err(other) => panic!("{other}"),
    };
    let spec = qgemm_cuda::manifest(variant).into_iter().find(|spec| spec.symbol == "qg_all_reduce_one_shot");
    let allocate = |bytes| device.allocate(bytes, "a test").expect("memory");
    let rank = |_| Rank {
        slots: allocate(2 * world * PACKETS * PACKET_BYTES),
        calls: allocate(PACKETS * 4),
        failed: allocate(4),
        host: allocate(8),
    };
    let ranks = (0..world).map(rank).collect();
    Some(Group { device, spec: spec.expect("it is in the manifest"), ranks })
}

impl Group {
    fn region(&self, name: &'static str, buffer: &Buffer, access: Access) -> Region {
        let start = device_address(&*self.device, buffer.into()).expect("its memory") as usize;
        Region { name, start, len: buffer.len(), access }
    }

    fn read(&self, buffer: &Buffer) -> Vec<u8> {
        let mut bytes = vec![0; buffer.len()];
        self.device.download(&self.device.default_stream(), buffer.into(), &mut bytes).expect("readable");
        bytes
    }

    fn write(&mut self, of: usize, first: usize, bytes: &[u8]) {
        let stream = self.device.default_stream();
        let whole = self.ranks[of].slots.view_mut();
        self.device.upload(&stream, bytes, whole.slice(first..first + bytes.len()).expect("inside")).expect("writable");
    }

    /// Runs `rank` on its elements, which begin `offset` bytes into a
    /// buffer, and returns the sum.
    fn run(&self, rank: usize, dtype: DType, own: &[f32], offset: usize) -> Vec<f32> {
        let (device, bytes) = (&*self.device, dtype.encode(own));
        let mut d = device.allocate(offset + bytes.len(), "a test").expect("memory");
        let view = d.view_mut().slice(offset..offset + bytes.len()).expect("inside");
        device.upload(&device.default_stream(), &bytes, view).expect("writable");
        let mut regions = vec![self.region("D", &d, Access::ReadWrite)];
        let mut slots = [0; MOST_RANKS];
        for (slot, of) in slots.iter_mut().zip(&self.ranks) {
            regions.push(self.region("packets", &of.slots, Access::ReadWrite));
            *slot = regions[regions.len() - 1].start as u64;
        }
        let mut word = |name, buffer| {
            regions.push(self.region(name, buffer, Access::ReadWrite));
            regions[regions.len() - 1].start as u64
        };
        let of = &self.ranks[rank];
        let (calls, failed, host) = (word("calls", &of.calls), word("failed", &of.failed), word("host", &of.host));
        let params = Params {
            d: regions[0].start as u64 + offset as u64,
            count: own.len() as u64,
            slots,
            calls,
            failed,
            host,
            limit: LIMIT,
            dtype: qgemm_hal::abi::dtype_code(dtype),
            rank: rank as u32,
            ranks: self.ranks.len() as u32,
            packets: PACKETS as u32,
        };
        let packets = bytes.len().div_ceil(8);
        let geometry = Geometry {
            blocks: [packets.div_ceil(THREADS) as u32, 1, 1],
            threads: THREADS as u32,
            shared_bytes: 0,
            params: bytemuck::bytes_of(&params),
            starts_early: false,
        };
        // SAFETY: `Params` is the kernel's parameter, and the regions are
        // all that it accesses.
        unsafe { launch_spec(device, &self.spec, geometry, &regions) }.expect("no fault");
        dtype.decode(&self.read(&d)[offset..])
    }
}

/// Packets of a message in call `call`.
fn packets(message: &[u8], call: u32) -> Vec<u8> {
    let mut words = message.to_vec();
    words.resize(message.len().next_multiple_of(8), 0);
    words.chunks(4).flat_map(|word| [word, &call.to_le_bytes()].concat()).collect()
}

/// First byte of a slot.
fn slot(world: usize, call: u32, from: usize) -> usize {
    (call as usize % 2 * world + from) * PACKETS * PACKET_BYTES
}

fn values(rank: usize, call: u32, count: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 37 + rank * 101 + call as usize * 13) % 211) as f32 * 0.375 - 20.0;
    (0..count).map(value).collect()
}

/// Runs a call on all ranks, and checks sums and packets.
fn call(group: &mut Group, number: u32, dtype: DType, count: usize, offset: usize) {
    let world = group.ranks.len();
    let own: Vec<Vec<f32>> = (0..world).map(|rank| dtype.decode(&dtype.encode(&values(rank, number, count)))).collect();
    let mut expected = own[0].clone();
    for other in &own[1..] {
        expected.iter_mut().zip(other).for_each(|(sum, value)| *sum += value);
    }
    let expected = dtype.decode(&dtype.encode(&expected));
    let encoded: Vec<_> = own.iter().map(|own| packets(&dtype.encode(own), number)).collect();
    for rank in 0..world {
        for (later, sent) in encoded.iter().enumerate().skip(rank + 1) {
            group.write(rank, slot(world, number, later), sent);
        }
    }
    for (rank, (own, sent)) in own.iter().zip(&encoded).enumerate() {
        assert_eq!(group.run(rank, dtype, own, offset), expected, "rank {rank} of {world}, {dtype}");
        for to in (0..world).filter(|to| *to != rank) {
            let first = slot(world, number, rank);
            assert!(group.read(&group.ranks[to].slots)[first..].starts_with(sent), "{rank} to {to}");
        }
    }
}

#[test]
fn every_rank_has_the_sum_in_the_order_of_ranks() {
    for (variant, world) in [(Variant::Sm70, 2), (Variant::Sm80, 3), (Variant::Sm90, 8)] {
        let test = "every_rank_has_the_sum_in_the_order_of_ranks";
        let Some(mut group) = group(test, variant, world) else { return };
        let calls = DType::ALL.into_iter().flat_map(|dtype| {
            let sizes = [1, 3, 4, 7, 512, 1023, PACKETS * 8 / dtype.bytes()];
            sizes.map(|count| (dtype, count, count % 3 * dtype.bytes()))
        });
        for (number, (dtype, count, offset)) in calls.enumerate() {
            // Packets count their own calls: a longer message begins new ones.
            group.ranks.iter_mut().for_each(|rank| {
                let (stream, calls) = (group.device.default_stream(), [number as u32; PACKETS]);
                group.device.upload(&stream, bytemuck::cast_slice(&calls), rank.calls.view_mut()).expect("writable");
            });
            call(&mut group, number as u32 + 1, dtype, count, offset);
        }
        assert!(group.ranks.iter().all(|rank| group.read(&rank.failed) == [0; 4] && group.read(&rank.host) == [0; 8]));
    }
}

#[test]
fn calls_are_counted_in_device_memory() {
    let Some(mut group) = group("calls_are_counted_in_device_memory", Variant::Sm80, 2) else { return };
    (1..=5).for_each(|number| call(&mut group, number, DType::F16, 1000, 0));
    let counted = group.read(&group.ranks[1].calls);
    let counted: &[u32] = bytemuck::cast_slice(&counted);
    assert!(counted[..250] == [5; 250] && counted[250..].iter().all(|calls| *calls == 0));
}

#[test]
fn a_rank_that_does_not_come_is_named_and_waited_for_once() {
    let test = "a_rank_that_does_not_come_is_named_and_waited_for_once";
    let Some(mut group) = group(test, Variant::Sm80, 3) else { return };
    let own = values(1, 1, 4);
    // Rank 0 came, rank 2 not.
    let from = slot(3, 1, 0);
    group.write(1, from, &packets(&DType::F16.encode(&values(0, 1, 4)), 1));
    assert_eq!(group.run(1, DType::F16, &own, 0), own, "nothing was written");
    let words =
        |bytes: Vec<u8>| bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect::<Vec<_>>();
    assert_eq!(words(group.read(&group.ranks[1].failed)), [3]);
    assert_eq!(words(group.read(&group.ranks[1].host)), [0, 3]);
    // The next call sends nothing, and returns at once.
    assert_eq!(group.run(1, DType::F16, &own, 0), own);
    assert_eq!(words(group.read(&group.ranks[1].calls))[0], 1);
}

#[test]
fn the_host_ends_a_wait() {
    let Some(mut group) = group("the_host_ends_a_wait", Variant::Sm80, 2) else { return };
    let stream = group.device.default_stream();
    let host = group.ranks[0].host.view_mut();
    group.device.upload(&stream, &[1, 0, 0, 0, 0, 0, 0, 0], host).expect("writable");
    group.run(0, DType::F32, &[1.0], 0);
    assert_eq!(group.read(&group.ranks[0].failed), [0xff; 4]);
    assert_eq!(group.read(&group.ranks[0].host)[4..], [0; 4], "no rank is blamed");
}
