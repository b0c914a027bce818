//! The ranks of a communicator, and their symmetric memory.

use std::ffi::c_void;
use std::rc::Rc;

use crate::base::error::Result;
use crate::base::owner::Owner;
use crate::gpu::nccl::{Network, WindowView};
use crate::memory::{Allocation, Memory};

/// Returns a rank's name in messages: with its GPU, if the numbers differ.
pub(crate) fn name(gpus: &[u32], rank: u32) -> String {
    match gpus.get(rank as usize) {
        Some(gpu) if *gpu != rank => format!("rank {rank} (GPU {gpu})"),
        _ => format!("rank {rank}"),
    }
}

/// The ranks for which windows and device communicators are created.
pub(crate) struct Ranks {
    /// The GPU of each rank.
    pub(crate) gpus: Rc<[u32]>,
    /// Size of the LSA teams, which are runs of consecutive ranks.
    pub(crate) lsa_ranks: usize,
    pub(crate) memory: Rc<Memory>,
    pub(crate) network: Rc<Network>,
}

impl Ranks {
    pub(crate) fn len(&self) -> usize {
        self.gpus.len()
    }

    /// Allocates memory on every rank, in window layout.
    pub(crate) fn symmetric(
        &self,
        bytes: usize,
        id: u32,
        owner: impl Fn(usize) -> Owner,
    ) -> Result<Symmetric> {
        let Self { gpus, lsa_ranks, memory, .. } = self;
        let allocation = Allocation::symmetric(memory, gpus, *lsa_ranks, bytes, owner)?;
        Ok(self.view(allocation, id))
    }

    /// Adds each rank's [`WindowView`] to memory of all ranks.
    pub(crate) fn view(&self, allocation: Allocation, id: u32) -> Symmetric {
        let view = |rank: usize| {
            let lsa_rank = rank % self.lsa_ranks;
            WindowView {
                flat_base: allocation.part(rank - lsa_rank),
                stride_4g: allocation.stride_4g(),
                lsa_rank: lsa_rank as i32,
                lsa_size: self.lsa_ranks as i32,
                world_rank: rank as i32,
                gpus: Rc::clone(&self.gpus),
                mc_offset_4k: allocation.mc_offset_4k(),
                id,
                world_base: allocation.part(0),
                lens: Rc::clone(allocation.lens()),
            }
        };
        let views = (0..self.len()).map(view).collect();
        Symmetric { allocation, views }
    }
}

/// Memory of all ranks, and each rank's view of it.
pub(crate) struct Symmetric {
    pub(crate) allocation: Allocation,
    /// Boxed, since handles point to them.
    pub(crate) views: Box<[WindowView]>,
}

impl Symmetric {
    pub(crate) fn handle(&self, rank: usize) -> *mut c_void {
        std::ptr::from_ref(&self.views[rank]).cast_mut().cast()
    }
}
