// Expert lists: shared parts of the list kernels.
// Workspace:
//   - the first bad slot of each chunk
//   - counts per chunk, which become list offsets
//   - the number of listed slots

@group(0) @binding(0) var<storage, read> ids: array<u32>;
@group(0) @binding(1) var<storage, read_write> workspace: array<u32>;
@group(0) @binding(2) var<storage, read_write> offsets: array<u32>;
@group(0) @binding(3) var<storage, read_write> counts: array<u32>;
@group(0) @binding(4) var<storage, read_write> rows: array<u32>;
@group(0) @binding(5) var<storage, read_write> status: array<u32>;

const MOST_EXPERTS: u32 = 1024u;
const NO_SLOT: u32 = 0xffffffffu;
const STATUS_BAD_ID: u32 = 1u;
const STATUS_TOO_FEW: u32 = 2u;

fn slots() -> u32 {
    return p.shape.tokens * p.shape.top_k;
}

fn first_slot(chunk: u32) -> u32 {
    return chunk * p.shape.chunk_tokens * p.shape.top_k;
}

fn last_slot(chunk: u32) -> u32 {
    return min(first_slot(chunk + 1u), slots());
}

fn place_of_count(chunk: u32, e: u32) -> u32 {
    return p.workspace_base + p.shape.chunks + chunk * p.shape.experts + e;
}
