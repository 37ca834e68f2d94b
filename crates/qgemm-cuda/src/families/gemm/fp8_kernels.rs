//! All kernels that multiply 8-bit operands directly.

use qgemm_formats::{Format, XFormat};
use qgemm_hal::{Unsupported, Variant};

use super::fp8::{Fp8Kernel, Fp8Product};
use super::{sm89_fp8_cp_async, sm90_fp8_wgmma_ws, sm90_s8_wgmma_ws};

/// The products of every main loop for 8-bit operands.
static PRODUCTS: [&Fp8Product; 3] =
    [&sm89_fp8_cp_async::PRODUCT, &sm90_fp8_wgmma_ws::PRODUCT, &sm90_s8_wgmma_ws::PRODUCT];

/// Kernels for weights of `format` and activations of `x`.
pub(in crate::families) fn fp8_kernels(format: Format, x: XFormat, variant: Variant) -> Vec<Fp8Kernel> {
    PRODUCTS.iter().flat_map(|product| product.kernels(format, x, variant)).collect()
}

/// The kernels that support a product.
///
/// # Errors
/// The refusal of the first kernel, when no kernel supports it.
pub(in crate::families) fn serving<K>(
    kernels: impl IntoIterator<Item = K>,
    serves: impl Fn(&K) -> Result<(), Unsupported>,
) -> Result<Vec<K>, Unsupported> {
    let (mut found, mut refused) = (Vec::new(), None);
    for kernel in kernels {
        match serves(&kernel) {
            Ok(()) => found.push(kernel),
            Err(why) => refused = refused.or(Some(why)),
        }
    }
    match refused {
        Some(why) if found.is_empty() => Err(why),
        _ => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::most_shared;

    #[test]
    fn formats_are_those_of_eight_bit_codes() {
        let served = |x: XFormat, variant: Variant| {
            let all = Format::all().filter(move |&format| !fp8_kernels(format, x, variant).is_empty());
            let mut names: Vec<_> = all.map(|format| format.name).collect();
            names.sort_unstable();
            names
        };
        let all = ["fp8_e4m3", "fp8_e4m3_block128", "fp8_e5m2", "fp8_e5m2_block128"];
        let with_ue8m0_scales = [&all[..], &["mxfp8", "mxfp8_e5m2"]].concat();
        for x in [XFormat::E4M3Block, XFormat::E4M3Token, XFormat::E4M3Tensor] {
            assert_eq!(served(x, Variant::Sm90), all, "{x}");
            assert_eq!([served(x, Variant::Sm89), served(x, Variant::Sm120)], [&*with_ue8m0_scales; 2], "{x}");
            assert!(served(x, Variant::Sm80).is_empty(), "{x}");
        }
        assert!(served(XFormat::MxFp8, Variant::Sm90).is_empty());
        assert_eq!(served(XFormat::Int8Token, Variant::Sm90), ["int8_channel"]);
    }

    #[test]
    fn tiles_fit_in_shared_memory() {
        for variant in Variant::ALL {
            for kernel in Format::all().flat_map(|format| fp8_kernels(format, XFormat::E4M3Block, variant)) {
                let config = kernel.config();
                assert!(config.shared_bytes <= most_shared(variant), "{config:?}");
            }
        }
    }
}
