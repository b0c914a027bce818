//! Converts device communicator requirements to NCCL's structs, and reads back the handles.

use std::ffi::c_int;
use std::sync::Arc;

use super::resources::{Answer, Node, Resource, ResourceKey, ResourceRequest, int};
use super::{DevCommRequirements, RequirementsRefusal};
use crate::sys::nccl::lists::RequirementLists;
use devcomm_sys::nccl::{Requirements, UNDEF_INT};
use devcomm_types::nccl::MultimemHandle;

/// `NCCL_CFT`: counted fabric transfers.
const CFT: c_int = 1;
/// `NCCL_CFT_MULTIMEM`: CFT's endpoints for multicast.
const CFT_MULTIMEM: c_int = 2;

/// Requirements for one call of `ncclDevCommCreate`, and the memory that it writes handles to.
/// Their addresses are stable when this value moves, also to another thread. It is kept until NCCL
/// has completed the call.
#[derive(Clone)]
pub(crate) struct Lowered {
    lists: Arc<RequirementLists>,
    resources: Vec<Resource>,
}

impl DevCommRequirements {
    /// Converts the requirements for NCCL.
    pub(crate) fn lower(&self) -> Result<Lowered, RequirementsRefusal> {
        let (mut resources, mut teams) = (Vec::new(), Vec::new());
        for resource in &self.resources {
            match resource.node()? {
                Node::Resource(node) => resources.push(node),
                Node::Team(node) => teams.push(node),
            }
        }
        let lists = RequirementLists::new(self.raw()?, &resources, &teams);
        Ok(Lowered { lists: Arc::new(lists), resources: self.resources.clone() })
    }

    /// Returns the requirements without their lists.
    pub(super) fn raw(&self) -> Result<Requirements, RequirementsRefusal> {
        let mut raw = Requirements::new();
        raw.lsa_multimem = self.lsa_multimem;
        raw.barrier_count = int("hybrid barriers", self.barriers)?;
        raw.lsa_barrier_count = int("LSA barriers", self.lsa_barriers)?;
        raw.rail_gin_barrier_count = int("rail GIN barriers", self.rail_gin_barriers)?;
        raw.world_gin_barrier_count = int("world GIN barriers", self.world_gin_barriers)?;
        raw.lsa_ll_a2a_block_count = int("LL all-to-all blocks", self.lsa_ll_a2a_blocks)?;
        raw.lsa_ll_a2a_slot_count = int("LL all-to-all slots", self.lsa_ll_a2a_slots)?;
        raw.gin_force_enable = self.gin_force_enable;
        raw.gin_context_count = int("GIN contexts", self.gin_contexts)?;
        raw.gin_signal_count = int("GIN signals", self.gin_signals)?;
        raw.gin_counter_count = int("GIN counters", self.gin_counters)?;
        raw.gin_connection_type = self.gin_connection.raw();
        raw.gin_exclusive_contexts = self.gin_exclusive_contexts;
        raw.gin_queue_depth = int("operations of a GIN queue", self.gin_queue_depth)?;
        raw.gin_traffic_class = self.gin_traffic_class.unwrap_or(UNDEF_INT);
        raw.gin_strong_signals_required = self.gin_strong_signals;
        raw.gin_va_signals_required = self.gin_va_signals;
        raw.gin_custom_stride = int("ranks of a custom stride", self.gin_custom_stride)?;
        raw.gin_type = self.gin_type.raw();
        raw.cft_caps =
            if self.cft { CFT } else { 0 } | if self.cft_multimem { CFT_MULTIMEM } else { 0 };
        raw.cft_barrier_count = int("CFT barriers", self.cft_barriers)?;
        Ok(raw)
    }
}

impl Lowered {
    /// Returns the lists to pass to NCCL.
    pub(crate) fn lists(&self) -> &Arc<RequirementLists> {
        &self.lists
    }

    /// Returns the handle for a key, once NCCL has completed the call; `None` for a key of other
    /// requirements.
    pub(crate) fn get<R: ResourceRequest>(&self, key: ResourceKey<R>) -> Option<R::Handle> {
        let asked = *self.resources.get(key.index)?;
        if asked != key.request.into() {
            return None;
        }
        // `self.resources` has teams and other resources; NCCL has a list for each.
        let is_team = |resource: &Resource| matches!(resource, Resource::Team(_));
        let before = &self.resources[..key.index];
        let teams = before.iter().filter(|resource| is_team(resource)).count();
        let answer = if is_team(&asked) {
            Answer(Default::default(), self.lists.team(teams)?)
        } else {
            Answer(self.lists.resource(key.index - teams)?, MultimemHandle::NULL)
        };
        Some(key.request.handle(answer))
    }
}
