//! Lays out the resources of a device communicator: checks the requirements and assigns offsets,
//! signals and counters, which are the same on every rank.

use devcomm_types::GinConnectionType;
use devcomm_types::nccl::{GinBarrierHandle, LsaBarrierHandle, ResourceHandle};

use crate::base::error::{Error, Result};
use crate::base::layout::RESOURCE_UNIT;
use crate::gpu::nccl::{BarrierSet, barrier_words};

/// Upper bound on barriers, contexts, signals and counters.
const MAX_COUNT: u32 = 1 << 20;
/// Upper bound on a rank's resources, in bytes. In [`RESOURCE_UNIT`]s it fits in a handle, of 32
/// bits.
const MAX_BYTES: usize = 1 << 38;
/// Default depth of a GIN queue, in operations.
const QUEUE_DEPTH: u32 = 512;

/// The requirements of a device communicator, the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DevCommConfig {
    pub(crate) lsa_barriers: u32,
    pub(crate) lsa_multimem: bool,
    pub(crate) barriers: u32,
    pub(crate) rail_gin_barriers: u32,
    pub(crate) world_gin_barriers: u32,
    pub(crate) gin_connection: GinConnectionType,
    /// Whether the network connects only the ranks of a rail.
    pub(crate) has_rails_only: bool,
    pub(crate) gin_custom_stride: u32,
    pub(crate) gin_contexts: u32,
    pub(crate) gin_signals: u32,
    pub(crate) gin_counters: u32,
    pub(crate) gin_strong_signals: bool,
    pub(crate) gin_queue_depth: u32,
    pub(crate) resources: Vec<Resource>,
    /// Size and stride of each team that has multicast addresses.
    pub(crate) teams: Vec<(u32, u32)>,
}

/// One entry of the resource requirement list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resource {
    pub(crate) bytes: usize,
    pub(crate) align: usize,
    pub(crate) signals: u32,
    pub(crate) counters: u32,
}

/// The buffer, signals and counters that were allocated for a [`Resource`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocatedResource {
    pub(crate) buffer: ResourceHandle,
    pub(crate) first_signal: u32,
    pub(crate) first_counter: u32,
}

/// The layout of a rank's resources.
pub(super) struct Plan {
    /// Size of a rank's resources, in bytes.
    pub(super) bytes: usize,
    pub(super) lsa_barrier: LsaBarrierHandle,
    pub(super) hybrid_lsa_barrier: LsaBarrierHandle,
    pub(super) hybrid_rail_gin_barrier: GinBarrierHandle,
    pub(super) hybrid_dense_gin_barrier: GinBarrierHandle,
    pub(super) rail_gin_barrier: GinBarrierHandle,
    pub(super) world_gin_barrier: GinBarrierHandle,
    /// The allocation for each of `DevCommConfig::resources`.
    pub(super) resources: Vec<AllocatedResource>,
    /// GIN's layout, if the device communicator has GIN.
    pub(super) gin: Option<GinPlan>,
}

/// The layout of GIN's resources.
pub(super) struct GinPlan {
    /// Distance between connected ranks.
    pub(super) stride: u32,
    /// The contexts, and the signals and counters of each. The products fit in 32 bits.
    pub(super) contexts: u32,
    pub(super) signals: u32,
    pub(super) counters: u32,
    /// The depth of a queue, in operations.
    pub(super) depth: usize,
    /// The buffer of the signals' shadows, those of context 0 first.
    pub(super) shadows: ResourceHandle,
    pub(super) barriers: Vec<BarrierSet>,
}

/// The totals allocated so far.
#[derive(Default)]
struct ResourceAllocator {
    bytes: usize,
    signals: u32,
    counters: u32,
    barriers: Vec<BarrierSet>,
}

fn refuse<T>(reason: impl Into<String>) -> Result<T> {
    Err(Error::Settings(reason.into()))
}

/// Refuses a count above [`MAX_COUNT`].
fn check(what: &str, count: u32) -> Result<u32> {
    if count <= MAX_COUNT {
        return Ok(count);
    }
    refuse(format!("{count} {what}, but at most {MAX_COUNT} are possible"))
}

impl ResourceAllocator {
    fn buffer(&mut self, bytes: usize, align: usize) -> Result<ResourceHandle> {
        let start = self.bytes.checked_next_multiple_of(align.max(RESOURCE_UNIT));
        let end = start.and_then(|start| start.checked_add(bytes));
        match (start, end.filter(|end| *end <= MAX_BYTES)) {
            (Some(start), Some(end)) => {
                self.bytes = end;
                Ok((start / RESOURCE_UNIT) as ResourceHandle)
            }
            _ => refuse(format!("resources of more than {MAX_BYTES} bytes")),
        }
    }

    fn lsa_barriers(&mut self, count: u32, ranks: usize) -> Result<LsaBarrierHandle> {
        let words = barrier_words(check("LSA barriers", count)? as usize, ranks);
        let buffer = self.buffer(words * size_of::<u32>(), RESOURCE_UNIT)?;
        Ok(LsaBarrierHandle { buffer, n_barriers: count as i32 })
    }

    fn signals(&mut self, count: u32) -> Result<u32> {
        let first = self.signals;
        self.signals = check("signals", first.saturating_add(count))?;
        Ok(first)
    }

    fn gin_barriers(&mut self, count: u32, ranks: u32) -> Result<GinBarrierHandle> {
        check("GIN barriers", count)?;
        let signals = count.saturating_mul(ranks);
        let signal0 = self.signals(signals)?;
        if count > 0 {
            self.barriers.push(BarrierSet { signal0, signals, ranks: Some(ranks) });
        }
        Ok(GinBarrierHandle { signal0, unused: 0 })
    }

    fn resource(&mut self, resource: &Resource) -> Result<AllocatedResource> {
        let Resource { bytes, align, signals, counters } = *resource;
        if !align.is_power_of_two() {
            return refuse(format!("a resource aligned to {align}, which is not a power of two"));
        }
        let buffer = if bytes > 0 { self.buffer(bytes, align)? } else { 0 };
        let (first_signal, first_counter) = (self.signals(signals)?, self.counters);
        self.counters = check("counters", first_counter.saturating_add(counters))?;
        if signals > 0 {
            // A GIN barrier of any team may be made of such signals, so its size is unknown.
            self.barriers.push(BarrierSet { signal0: first_signal, signals, ranks: None });
        }
        Ok(AllocatedResource { buffer, first_signal, first_counter })
    }
}

/// Returns the distance between connected ranks, if any are connected.
fn stride_of(config: &DevCommConfig, lsa_ranks: usize) -> Result<Option<u32>> {
    match config.gin_connection {
        GinConnectionType::None => Ok(None),
        GinConnectionType::Full => Ok(Some(1)),
        GinConnectionType::Rail => Ok(Some(lsa_ranks as u32)),
        GinConnectionType::CustomStride => {
            let stride = config.gin_custom_stride;
            if stride > 0 && lsa_ranks.is_multiple_of(stride as usize) {
                return Ok(Some(stride));
            }
            refuse(format!(
                "a custom stride of {stride}, which does not divide {lsa_ranks}, the LSA team's \
                size"
            ))
        }
        other => refuse(format!("unknown GIN connection {other}")),
    }
}

impl Plan {
    pub(super) fn new(config: &DevCommConfig, ranks: usize, lsa_ranks: usize) -> Result<Self> {
        // No buffer is at offset 0, so that a zero handle is detected.
        let mut allocator =
            ResourceAllocator { bytes: RESOURCE_UNIT, ..ResourceAllocator::default() };
        allocator.signals(config.gin_signals)?;
        allocator.counters = check("counters", config.gin_counters)?;
        let lsa_barrier = allocator.lsa_barriers(config.lsa_barriers, lsa_ranks)?;
        let hybrid_lsa_barrier = allocator.lsa_barriers(config.barriers, lsa_ranks)?;
        let resources = config.resources.iter().map(|resource| allocator.resource(resource));
        let resources = resources.collect::<Result<Vec<_>>>()?;
        let rail_ranks = (ranks / lsa_ranks) as u32;
        let stride = stride_of(config, lsa_ranks)?;
        let hybrid_rail_gin_barrier = allocator.gin_barriers(config.barriers, rail_ranks)?;
        let rail_gin_barrier = allocator.gin_barriers(config.rail_gin_barriers, rail_ranks)?;
        let world_gin_barrier = allocator.gin_barriers(config.world_gin_barriers, ranks as u32)?;
        // NCCL's `dense` barriers are for all ranks that GIN connects: every `stride`-th.
        let dense_ranks = ranks as u32 / stride.unwrap_or(1);
        let hybrid_dense_gin_barrier = allocator.gin_barriers(config.barriers, dense_ranks)?;
        let gin = match stride {
            None if allocator.signals > 0 || allocator.counters > 0 => {
                return refuse(
                    "signals, counters or barriers over the network, but gin_connection is none",
                );
            }
            None => None,
            Some(stride) => {
                if config.world_gin_barriers > 0 && stride > 1 {
                    return refuse(format!(
                        "world GIN barriers, but only ranks {stride} apart are connected"
                    ));
                }
                let contexts = check("GIN contexts", config.gin_contexts)?;
                if contexts == 0 {
                    return refuse("a GIN connection without contexts");
                }
                let (signals, counters) = (allocator.signals, allocator.counters);
                // Kernels and the simulator number those of all contexts by 32 bits.
                if contexts.checked_mul(signals.max(counters)).is_none() {
                    return refuse(format!(
                        "{contexts} GIN contexts with {signals} signals and {counters} counters \
                        each"
                    ));
                }
                let shadows = (contexts * signals) as usize;
                let depth = config.gin_queue_depth;
                Some(GinPlan {
                    stride,
                    contexts,
                    signals,
                    counters,
                    depth: if depth == 0 { QUEUE_DEPTH } else { depth } as usize,
                    shadows: allocator
                        .buffer(shadows.saturating_mul(size_of::<u64>()), RESOURCE_UNIT)?,
                    barriers: std::mem::take(&mut allocator.barriers),
                })
            }
        };
        Ok(Self {
            bytes: allocator.bytes,
            lsa_barrier,
            hybrid_lsa_barrier,
            hybrid_rail_gin_barrier,
            hybrid_dense_gin_barrier,
            rail_gin_barrier,
            world_gin_barrier,
            resources,
            gin,
        })
    }
}
