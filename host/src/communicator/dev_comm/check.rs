//! Checks requirements against what this rank's machine supports, before the collective call that
//! would fail.
//!
//! Most rules are those of `ncclDevCommCreate` 2.32.3. NCCL does not check the others, so that a
//! kernel would fail or hang instead; comments mark these.

use std::ffi::c_int;

use devcomm_types::{GinConnectionType, GinType, Team};

use super::facilities::Facilities;
use super::resources::{
    GinBarriers, HANDLE_UNIT, LlA2a, LsaBarriers, MAX_BUFFER_BYTES, Node, Resource, TeamMultimem,
};
use super::{DevCommRequirements, RequirementsRefusal};
use crate::communicator::Properties;
use crate::communicator::properties::GinTypes;

/// Refuses requirements that a communicator with these properties cannot meet on this machine.
pub(super) fn check(
    requirements: &DevCommRequirements,
    properties: &Properties,
    facilities: &Facilities,
) -> Result<(), RequirementsRefusal> {
    // Refuses numbers that do not fit into NCCL's struct; the struct itself is not used here.
    requirements.raw()?;
    if !properties.device_api {
        return Err(RequirementsRefusal::NoDeviceApi);
    }
    check_multimem(requirements, properties, facilities.nvls_enable.as_deref())?;
    check_cft(requirements, properties)?;
    check_teams(requirements, properties)?;
    let totals = Totals::of(requirements, properties)?;
    let gin_types = check_gin(requirements, properties, facilities, &totals)?;
    totals.check(gin_types)
}

fn check_multimem(
    asked: &DevCommRequirements,
    properties: &Properties,
    nvls_enable: Option<&str>,
) -> Result<(), RequirementsRefusal> {
    let is_multimem_team = |resource: &Resource| {
        matches!(resource, Resource::Team(TeamMultimem { multimem: true, .. }))
    };
    let what = if asked.lsa_multimem {
        "lsa_multimem"
    } else if asked.resources.iter().any(is_multimem_team) {
        "a team with multimem"
    } else if asked.cft_multimem {
        "cft_multimem"
    } else {
        return Ok(());
    };
    let why = if nvls_enable.is_some_and(|value| value.trim() == "0") {
        "NCCL_NVLS_ENABLE is 0"
    } else if !properties.multimem {
        "the GPUs have none (multimemSupport is false): it needs NVLink switches, a driver that \
         can use them, and GPUs of compute capability 9.0 or higher"
    } else {
        return Ok(());
    };
    Err(RequirementsRefusal::NoMultimem { what, why })
}

fn check_cft(
    asked: &DevCommRequirements,
    properties: &Properties,
) -> Result<(), RequirementsRefusal> {
    let refuse = |what, property| Err(RequirementsRefusal::NoCft { what, property });
    if asked.cft && !properties.cft {
        refuse("cft", "cftSupport")
    } else if asked.cft_multimem && !properties.cft_multicast {
        refuse("cft_multimem", "cftMulticastSupport")
    } else if asked.cft_barriers > 0 && !properties.cft {
        refuse("cft_barriers", "cftSupport")
    } else {
        Ok(())
    }
}

/// Fails unless teams consist of ranks of the communicator, which NCCL does not check.
fn check_teams(
    asked: &DevCommRequirements,
    properties: &Properties,
) -> Result<(), RequirementsRefusal> {
    for resource in &asked.resources {
        let (_, Some(team)) = (resource.node()?, resource.team()) else { continue };
        if !is_within(team, properties.world_team()) {
            return Err(RequirementsRefusal::NotATeam { team });
        }
        let what = match resource {
            Resource::LsaBarriers(_) => "LSA barriers",
            Resource::Team(TeamMultimem { multimem: true, .. }) => "multicast mappings",
            _ => continue,
        };
        if !is_within(team, properties.lsa_team()) {
            let lsa_size = properties.lsa_size();
            return Err(RequirementsRefusal::TeamBeyondLsa { what, team, lsa_size });
        }
    }
    Ok(())
}

/// Returns whether all members of `team` are in `outer`, a team with stride 1. This rank is in
/// both, with the number `rank`.
fn is_within(team: Team, outer: Team) -> bool {
    let rank_in_outer = |member: i32| {
        let distance = (i64::from(member) - i64::from(team.rank)) * i64::from(team.stride);
        i64::from(outer.rank) + distance
    };
    let all = 0..i64::from(outer.n_ranks);
    all.contains(&rank_in_outer(0)) && all.contains(&rank_in_outer(team.n_ranks - 1))
}

/// Returns the back ends that NCCL may use; `None` if no connection is asked for.
fn check_gin(
    asked: &DevCommRequirements,
    properties: &Properties,
    facilities: &Facilities,
    totals: &Totals,
) -> Result<Option<GinTypes>, RequirementsRefusal> {
    let connection = asked.connection();
    let one_lsa_team = properties.n_lsa_teams <= 1;
    if connection == GinConnectionType::None {
        return match totals.first_network_use(asked) {
            None => Ok(None),
            Some(_) if asked.barriers > 0 && one_lsa_team => {
                let (count, n_ranks) = (asked.barriers, properties.n_ranks);
                Err(RequirementsRefusal::BarriersWithoutNetwork { count, n_ranks })
            }
            Some(what) => Err(RequirementsRefusal::NotConnected { what }),
        };
    }
    let (full, railed) = (properties.gin_type, properties.railed_gin_type);
    if full == GinType::None && railed == GinType::None {
        let named = (asked.gin_type != GinType::None).then_some(asked.gin_type);
        let why = (facilities.why_no_gin)(named);
        return Err(RequirementsRefusal::NoGin { connection, one_lsa_team, why });
    }
    if connection == GinConnectionType::Full && full == GinType::None {
        return Err(RequirementsRefusal::OnlyRail { railed });
    }
    let stride = stride_of(connection, asked.gin_custom_stride, properties)?;
    if asked.gin_contexts == 0 {
        return Err(RequirementsRefusal::NoContexts);
    }
    // With RAIL, NCCL refuses world barriers whatever the stride. With a custom stride it does not
    // check, and the barriers would hang.
    let count = asked.world_gin_barriers;
    if count > 0 && (stride > 1 || connection == GinConnectionType::Rail) {
        return Err(RequirementsRefusal::WorldBarriersNotConnected { count, connection, stride });
    }
    for resource in &asked.resources {
        // NCCL does not check this.
        if let Resource::GinBarriers(GinBarriers { team, .. }) = *resource
            && team.n_ranks > 1
            && team.stride.unsigned_abs() % stride != 0
        {
            return Err(RequirementsRefusal::TeamNotConnected { team, stride });
        }
    }
    gin_types(asked, properties, facilities).map(Some)
}

/// Returns the stride of a connection: a rank reaches the ranks at multiples of this distance.
fn stride_of(
    connection: GinConnectionType,
    custom: u32,
    properties: &Properties,
) -> Result<u32, RequirementsRefusal> {
    let max = u32::try_from(properties.lsa_size()).unwrap_or(u32::MAX);
    match connection {
        GinConnectionType::Full => Ok(1),
        GinConnectionType::Rail => Ok(max),
        GinConnectionType::CustomStride => {
            let multiple_of =
                properties.gin_min_stride.ok_or(RequirementsRefusal::NoCustomStride)?;
            if custom == 0 || custom > max || !custom.is_multiple_of(multiple_of) {
                return Err(RequirementsRefusal::BadStride { stride: custom, multiple_of, max });
            }
            Ok(custom)
        }
        connection => Err(RequirementsRefusal::UnknownConnection { connection }),
    }
}

/// Returns the available back ends that have the kinds of signals that are asked for. NCCL uses the
/// first one that it can initialize.
fn gin_types(
    asked: &DevCommRequirements,
    properties: &Properties,
    facilities: &Facilities,
) -> Result<GinTypes, RequirementsRefusal> {
    let named = [properties.gin_type, properties.railed_gin_type];
    let available: GinTypes = properties.gin_types.iter().chain(named).collect();
    let candidates = match asked.gin_type {
        GinType::None => available,
        asked if available.contains(asked) => [asked].into_iter().collect(),
        asked => {
            let why = (facilities.why_no_gin)(Some(asked));
            return Err(RequirementsRefusal::NoSuchGinType { asked, available, why });
        }
    };
    let (strong, va) = (asked.gin_strong_signals, asked.gin_va_signals);
    let usable: GinTypes = candidates
        .iter()
        .filter(|&gin_type| !(strong || va) || has_strong_and_va_signals(gin_type))
        .collect();
    if usable.is_empty() {
        return Err(RequirementsRefusal::NoSuchSignals { strong, va, available: candidates });
    }
    Ok(usable)
}

/// Returns whether a back end may have strong signals and VA signals: each back end has both or
/// neither. EFA_GDA has neither: NCCL's device code for it says that its signals are not strong,
/// and asserts that they are numbered ones. PROXY has both. Over TCP it has VA signals only for
/// windows in GPU memory; NCCL announces them without that limit, so they are not refused here, and
/// NCCL refuses a VA signal to a window in host memory later ("host VA signals are not supported").
fn has_strong_and_va_signals(gin_type: GinType) -> bool {
    gin_type != GinType::EfaGda
}

/// Returns the largest numbers of signals and of counters, by the bits of their ids in a back end's
/// descriptors: 24 and 23 for PROXY, 16 for GPI.
fn max_ids(gin_type: GinType) -> (u64, u64) {
    match gin_type {
        GinType::Proxy => (1 << 24, 1 << 23),
        GinType::Gpi => (1 << 16, 1 << 16),
        _ => (c_int::MAX as u64, c_int::MAX as u64),
    }
}

/// The totals of all requirements. These are lower bounds, since NCCL adds requirements of its own.
struct Totals {
    bytes: u64,
    signals: u64,
    counters: u64,
    /// Whether a resource that the program has added to the list needs signals or counters.
    listed: bool,
}

impl Totals {
    fn of(
        asked: &DevCommRequirements,
        properties: &Properties,
    ) -> Result<Self, RequirementsRefusal> {
        let (world, lsa) = (properties.world_team(), properties.lsa_team());
        let rail = properties.rail_team();
        let ll_a2a = LlA2a {
            blocks: asked.lsa_ll_a2a_blocks,
            max_elements: asked.lsa_ll_a2a_slots,
            // An element as large as a slot takes one slot, and `lsa_ll_a2a_slots` counts slots.
            element_size: 8,
        };
        let built_in: [(u32, Resource); 6] = [
            (asked.lsa_barriers, LsaBarriers { team: lsa, count: asked.lsa_barriers }.into()),
            (asked.barriers, LsaBarriers { team: lsa, count: asked.barriers }.into()),
            (asked.barriers, GinBarriers { team: rail, count: asked.barriers }.into()),
            (
                asked.rail_gin_barriers,
                GinBarriers { team: rail, count: asked.rail_gin_barriers }.into(),
            ),
            (
                asked.world_gin_barriers,
                GinBarriers { team: world, count: asked.world_gin_barriers }.into(),
            ),
            (ll_a2a.blocks, ll_a2a.into()),
        ];
        let built_in = built_in.iter().filter(|(count, _)| *count > 0);
        let mut totals = Self {
            bytes: 0,
            signals: asked.gin_signals.into(),
            counters: asked.gin_counters.into(),
            listed: false,
        };
        let listed = asked.resources.iter().map(|resource| (true, resource));
        for (listed, resource) in built_in.map(|(_, resource)| (false, resource)).chain(listed) {
            let Node::Resource(node) = resource.node()? else { continue };
            let (bytes, align) = (node.buffer.0 as u64, node.buffer.1.max(HANDLE_UNIT) as u64);
            let start = totals.bytes.checked_next_multiple_of(align).unwrap_or(u64::MAX);
            totals.bytes = start.saturating_add(bytes);
            totals.signals += node.signals as u64;
            totals.counters += node.counters as u64;
            totals.listed |= listed && (node.signals > 0 || node.counters > 0);
        }
        if asked.connection() != GinConnectionType::None {
            // NCCL adds a shadow of 8 bytes for each signal of each context.
            let shadows = u64::from(asked.gin_contexts).saturating_mul(totals.signals);
            totals.bytes = totals.bytes.saturating_add(shadows.saturating_mul(8));
        }
        Ok(totals)
    }

    /// Returns the first requirement that needs the network.
    fn first_network_use(&self, asked: &DevCommRequirements) -> Option<&'static str> {
        let all = [
            (asked.gin_signals > 0, "gin_signals"),
            (asked.gin_counters > 0, "gin_counters"),
            (asked.barriers > 0, "barriers"),
            (asked.rail_gin_barriers > 0, "rail_gin_barriers"),
            (asked.world_gin_barriers > 0, "world_gin_barriers"),
            (self.listed, "GIN barriers, signals or counters added as resources"),
        ];
        all.into_iter().find_map(|(wanted, what)| wanted.then_some(what))
    }

    /// Refuses totals above the limits: NCCL counts with an int and does not check for overflow.
    fn check(&self, gin_types: Option<GinTypes>) -> Result<(), RequirementsRefusal> {
        // NCCL chooses the back end, so the largest limit counts. Without a connection the limit is
        // 0, and so are the totals: `check_gin` has refused others.
        let limit = |of: fn((u64, u64)) -> u64| {
            let types = gin_types.unwrap_or_default();
            types.iter().map(|gin_type| of(max_ids(gin_type))).max().unwrap_or(0)
        };
        let checks = [
            ("bytes of resource buffers", self.bytes, MAX_BUFFER_BYTES),
            ("signals, with those of the barriers,", self.signals, limit(|ids| ids.0)),
            ("counters", self.counters, limit(|ids| ids.1)),
        ];
        match checks.into_iter().find(|(_, asked, limit)| asked > limit) {
            None => Ok(()),
            Some((what, asked, limit)) => Err(RequirementsRefusal::TooMany { what, asked, limit }),
        }
    }
}
