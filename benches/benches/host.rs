//! Quantizing a weight, and loading it onto the CPU device.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use qgemm_api::{Context, Format, quantize};
use qgemm_benches::{FORMATS, SIZE, values, weight};

fn quantizing(criterion: &mut Criterion) {
    let values = values();
    let mut group = criterion.benchmark_group("quantize");
    group.throughput(Throughput::Elements((SIZE * SIZE) as u64)).sample_size(10);
    for name in FORMATS {
        let format: Format = name.parse().expect("a format of this build");
        group.bench_function(name, |b| b.iter(|| quantize(&values, SIZE, SIZE, format).expect("valid values")));
    }
}

fn loading(criterion: &mut Criterion) {
    let ctx = Context::open("cpu").expect("every machine has a CPU");
    let mut group = criterion.benchmark_group("load");
    group.sample_size(10);
    for name in FORMATS {
        let host = weight(name);
        group.throughput(Throughput::Bytes(host.blocks().len() as u64));
        group.bench_function(name, |b| b.iter(|| ctx.load(&host).expect("enough memory")));
    }
}

criterion_group!(benches, quantizing, loading);
criterion_main!(benches);
