//! Parameters of kernels that read queries or keys by TMA:
//! `TmaIndexerParams` in `entry/sm90_indexer_wgmma_ws.cu` and
//! `entry/sm90_indexer_wgmma_decode_tma.cu`.

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::IndexerParams;
use qgemm_hal::{HalError, Operands};

use super::at_operands;
use crate::families::kernel_launch::{Addresses, Params};
use crate::families::launch_params::LaunchParams;
use crate::tensor_map::{EncodedMap, TileMap};

/// Padding up to the tensor map, which is
/// aligned to 64 bytes.
const PADDING: usize = size_of::<IndexerParams>().next_multiple_of(64) - size_of::<IndexerParams>();

#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct TmaIndexerParams {
    indexer: IndexerParams,
    padding: [u64; PADDING / 8],
    map: EncodedMap,
}

/// The mapped operand.
#[derive(Clone, Copy, Debug)]
pub(super) enum MappedOperand {
    Queries,
    Keys,
}

/// Kernel parameter without addresses.
#[derive(Debug)]
pub(super) struct Mapped {
    pub indexer: IndexerParams,
    pub map: TileMap,
    pub of: MappedOperand,
}

impl Params for Mapped {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let indexer = at_operands(&self.indexer, operands, at)?;
        let address = match self.of {
            MappedOperand::Queries => indexer.q,
            MappedOperand::Keys => indexer.k,
        };
        let map = (at.encode)(&TileMap { address, ..self.map })?;
        Ok(LaunchParams::of(&TmaIndexerParams { indexer, padding: [0; PADDING / 8], map }))
    }
}
