//! Hadamard rotation of a head.

use qgemm_hal::op::kv_append::{hadamard_block, hadamard_scale};

/// Multiplies each block of a head by the orthonormal
/// Walsh–Hadamard matrix.
///
/// The order of sums is that of every device.
pub(super) fn hadamard(values: &mut [f32]) {
    let block = hadamard_block(values.len());
    let scale = hadamard_scale(block);
    let mut stride = 1;
    while stride < block {
        for pairs in values.chunks_exact_mut(2 * stride) {
            let (first, second) = pairs.split_at_mut(stride);
            first.iter_mut().zip(second).for_each(|(a, b)| (*a, *b) = (*a + *b, *a - *b));
        }
        stride *= 2;
    }
    values.iter_mut().for_each(|value| *value *= scale);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_becomes_a_column_of_its_block() {
        let mut values = [0.0; 24];
        values[8 + 3] = 1.0;
        hadamard(&mut values);
        let column = |i: usize| if (i & 3).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
        let expected = |i: usize| if (8..16).contains(&i) { column(i) / 8f32.sqrt() } else { 0.0 };
        assert!((0..24).all(|i| (values[i] - expected(i)).abs() < 1e-7), "{values:?}");
    }

    #[test]
    fn it_is_its_own_inverse() {
        let given: Vec<f32> = (0..96).map(|i| ((i * 37) % 101) as f32 * 0.02 - 1.0).collect();
        let mut values = given.clone();
        hadamard(&mut values);
        hadamard(&mut values);
        assert!(values.iter().zip(&given).all(|(got, given)| (got - given).abs() < 1e-6));
    }
}
