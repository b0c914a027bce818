//! The requirements of a device communicator: what the kernels that will use it need.

use devcomm_types::{GinConnectionType, GinType};

use super::RequirementsRefusal;
use super::check::check;
use super::facilities::Facilities;
use super::resources::{Resource, ResourceKey, ResourceRequest};
use crate::communicator::Properties;

/// Declares [`DevCommRequirements`]. The braces list the fields with hand-written setters and their
/// defaults; after them come the fields with generated setters: parameter, default, NCCL's name.
macro_rules! requirements {
    (
        $(#[$attribute:meta])*
        pub struct DevCommRequirements {
            $( $other:ident: $other_type:ty = $other_default:expr, )*
        }
        $(
            $(#[doc = $doc:literal])*
            $name:ident($value:ident: $type:ty) = $default:expr, $alias:literal;
        )*
    ) => {
        $(#[$attribute])*
        pub struct DevCommRequirements {
            $( pub(super) $name: $type, )*
            $( pub(super) $other: $other_type, )*
        }

        impl DevCommRequirements {
            /// Requires nothing but access to the ranks' windows.
            #[must_use]
            pub const fn new() -> Self {
                Self { $( $name: $default, )* $( $other: $other_default, )* }
            }

            $(
                $(#[doc = $doc])*
                #[must_use]
                #[doc(alias = $alias)]
                pub const fn $name(mut self, $value: $type) -> Self {
                    self.$name = $value;
                    self
                }
            )*
        }

        impl Default for DevCommRequirements {
            fn default() -> Self {
                Self::new()
            }
        }
    };
}

requirements! {
    /// What kernels need from a device communicator; must be the same on every rank.
    ///
    /// Unset requirements have NCCL's default, except [`gin_va_signals`](Self::gin_va_signals).
    ///
    /// ```
    /// use devcomm_host::{DevCommRequirements, GinConnectionType, ResourceBuffer, Signals};
    ///
    /// let mut requirements =
    ///     DevCommRequirements::new().lsa_barriers(64).gin_connection(GinConnectionType::Full);
    /// assert_eq!(requirements.lsa_barrier_count(), 64);
    /// // Additional resources: `add` returns a key; for it, `dev.resource` returns a handle.
    /// let arrived = requirements.add(Signals { count: 8 });
    /// let scratch = requirements.add(ResourceBuffer { bytes: 1 << 20, align: 128 });
    /// // let dev = comm.create_dev_comm(requirements)?;
    /// // let (arrived, scratch) = (dev.resource(arrived)?, dev.resource(scratch)?);
    /// # assert_eq!((arrived.request().count, scratch.request().align), (8, 128));
    /// ```
    ///
    /// NCCL: `ncclDevCommRequirements_t` of 2.32.3, each field but four: `size`, `magic` and
    /// `version` are filled in, and `useRuntimeVersion` stays false, because it is for device code
    /// that is linked against the installed library at run time. Kernels here are linked at build
    /// time, against NCCL's device code of one version, and read that version's layout.
    #[derive(Clone, Debug, PartialEq)]
    #[doc(alias = "ncclDevCommRequirements_t")]
    #[doc(alias = "ncclDevCommRequirements")]
    pub struct DevCommRequirements {
        lsa_ll_a2a_blocks: u32 = 0,
        lsa_ll_a2a_slots: u32 = 0,
        gin_force_enable: bool = false,
        gin_traffic_class: Option<i32> = None,
        resources: Vec<Resource> = Vec::new(),
    }

    /// A multicast mapping over the ranks of the LSA team. Refused where
    /// [`Properties::multimem`](crate::Properties::multimem) is false or NCCL_NVLS_ENABLE is 0.
    /// NCCL: `lsaMultimem`.
    lsa_multimem(wanted: bool) = false, "lsaMultimem";

    /// The number of hybrid barriers between all ranks, by load and store within an LSA team and
    /// over the network between them. They need a [`gin_connection`](Self::gin_connection) even
    /// if there is only one LSA team. NCCL: `barrierCount`.
    barriers(count: u32) = 0, "barrierCount";

    /// The number of barriers between the ranks that reach each other by load and store: at least
    /// one per block of the largest grid. NCCL: `lsaBarrierCount`.
    lsa_barriers(count: u32) = 0, "lsaBarrierCount";

    /// The number of barriers over the network between the ranks of the rail team. NCCL:
    /// `railGinBarrierCount`.
    rail_gin_barriers(count: u32) = 0, "railGinBarrierCount";

    /// The number of barriers over the network between all ranks. They need
    /// [`GinConnectionType::Full`]. NCCL: `worldGinBarrierCount`.
    world_gin_barriers(count: u32) = 0, "worldGinBarrierCount";

    /// The number of contexts, each with its own queues, signals and counters. This is a hint: the
    /// device communicator has the actual number. Default: 4. NCCL: `ginContextCount`.
    gin_contexts(count: u32) = 4, "ginContextCount";

    /// The number of signals, with ids from 0. NCCL: `ginSignalCount`.
    gin_signals(count: u32) = 0, "ginSignalCount";

    /// The number of counters, with ids from 0. NCCL: `ginCounterCount`.
    gin_counters(count: u32) = 0, "ginCounterCount";

    /// Which ranks a kernel reaches over the network. Default: none. NCCL: `ginConnectionType`.
    gin_connection(connection: GinConnectionType) = GinConnectionType::None, "ginConnectionType";

    /// Requires contexts that no other device communicator uses. NCCL: `ginExclusiveContexts`.
    gin_exclusive_contexts(wanted: bool) = false, "ginExclusiveContexts";

    /// The number of operations that a queue holds. Default: 0, the back end's choice. NCCL:
    /// `ginQueueDepth`.
    gin_queue_depth(operations: u32) = 0, "ginQueueDepth";

    /// Requires a back end with strong signals, which arrive after all earlier puts to the same
    /// rank on the same context. Default: true, as in NCCL, which excludes EFA_GDA. With `false`,
    /// NCCL's GIN barriers use weak signals, and no longer wait for earlier puts except on EFA_GDA.
    /// Then a kernel must not use strong signals, or rely on GIN barriers for the completion of
    /// puts. NCCL: `ginStrongSignalsRequired`.
    gin_strong_signals(required: bool) = true, "ginStrongSignalsRequired";

    /// Requires a back end with VA signals: signals at addresses in windows. **Default: false;
    /// NCCL's default is true**, which excludes EFA_GDA also for kernels without such signals. With
    /// `false`, a kernel must not use VA signals; they also need a window registered with
    /// `NCCL_WIN_STRICT_ORDERING` and, with the back end PROXY over TCP, in GPU memory. NCCL:
    /// `ginVaSignalsRequired`.
    gin_va_signals(required: bool) = false, "ginVaSignalsRequired";

    /// The distance in ranks for [`GinConnectionType::CustomStride`]: a multiple of
    /// [`Properties::gin_min_stride`](crate::Properties::gin_min_stride), and at most the size of
    /// an LSA team. NCCL: `ginCustomStride`.
    gin_custom_stride(ranks: u32) = 1, "ginCustomStride";

    /// The only back end to use; [`GinType::None`], the default, allows any. NCCL: `ginType`.
    gin_type(gin_type: GinType) = GinType::None, "ginType";

    /// Requires the logical endpoints of single ranks, NCCL's counted fabric transfers (CFT). NCCL:
    /// `NCCL_CFT` in `cftCaps`.
    cft(wanted: bool) = false, "cftCaps";

    /// Requires CFT's logical endpoints for multicast. NCCL: `NCCL_CFT_MULTIMEM` in `cftCaps`.
    cft_multimem(wanted: bool) = false, "cftCaps";

    /// The number of CFT barriers. NCCL: `cftBarrierCount`.
    cft_barriers(count: u32) = 0, "cftBarrierCount";
}

impl DevCommRequirements {
    /// Requests memory for low-latency all-to-all sessions in the LSA team: `blocks` blocks with
    /// `slots` slots of 8 bytes each (see [`LlA2a::slots`](super::LlA2a::slots)). NCCL returns no
    /// handle for it; to get one, [`add`](Self::add) an [`LlA2a`](super::LlA2a) instead. NCCL:
    /// `lsaLLA2ABlockCount`, `lsaLLA2ASlotCount`.
    #[must_use]
    #[doc(alias = "lsaLLA2ABlockCount")]
    #[doc(alias = "lsaLLA2ASlotCount")]
    pub const fn lsa_ll_a2a(mut self, blocks: u32, slots: u32) -> Self {
        (self.lsa_ll_a2a_blocks, self.lsa_ll_a2a_slots) = (blocks, slots);
        self
    }

    /// Overrides [`gin_connection`](Self::gin_connection) with [`GinConnectionType::Full`].
    /// NCCL: `ginForceEnable`, deprecated since 2.29.7.
    #[must_use]
    #[deprecated(note = "NCCL has deprecated it; use gin_connection(GinConnectionType::Full)")]
    #[doc(alias = "ginForceEnable")]
    pub const fn gin_force_enable(mut self, wanted: bool) -> Self {
        self.gin_force_enable = wanted;
        self
    }

    /// Sets the network's traffic class. Default: the communicator's. NCCL: `ginTrafficClass`.
    #[must_use]
    #[doc(alias = "ginTrafficClass")]
    pub const fn gin_traffic_class(mut self, class: i32) -> Self {
        self.gin_traffic_class = Some(class);
        self
    }

    /// Adds a resource. For the key that this returns,
    /// [`DevCommResource::resource`](super::DevCommResource::resource) returns the handle.
    ///
    /// NCCL: `resourceRequirementsList`, `teamRequirementsList`.
    #[doc(alias = "resourceRequirementsList")]
    #[doc(alias = "teamRequirementsList")]
    pub fn add<R: ResourceRequest>(&mut self, request: R) -> ResourceKey<R> {
        self.resources.push(request.into());
        ResourceKey { index: self.resources.len() - 1, request }
    }

    /// Returns the number of LSA barriers asked for.
    #[must_use]
    pub const fn lsa_barrier_count(&self) -> u32 {
        self.lsa_barriers
    }

    /// Returns whether a multicast mapping is asked for.
    #[must_use]
    pub const fn wants_multimem(&self) -> bool {
        self.lsa_multimem
    }

    /// Returns which ranks a kernel will reach over the network.
    #[must_use]
    pub const fn connection(&self) -> GinConnectionType {
        if self.gin_force_enable { GinConnectionType::Full } else { self.gin_connection }
    }

    /// Checks whether a communicator with these properties can meet the requirements. Not
    /// collective; creating the device communicator makes the same check on every rank.
    ///
    /// # Errors
    ///
    /// The first requirement that cannot be met, and why.
    pub fn check(&self, properties: &Properties) -> Result<(), RequirementsRefusal> {
        check(self, properties, &Facilities::here())
    }
}

impl DevCommRequirements {
    /// Returns the name and value of each requirement that must be the same on all ranks.
    pub(crate) fn describe(&self) -> Vec<(String, String)> {
        // Destructured, so that a new field cannot be forgotten here.
        let Self {
            lsa_multimem,
            barriers,
            lsa_barriers,
            rail_gin_barriers,
            world_gin_barriers,
            lsa_ll_a2a_blocks,
            lsa_ll_a2a_slots,
            gin_force_enable: _,
            gin_contexts,
            gin_signals,
            gin_counters,
            gin_connection: _,
            gin_exclusive_contexts,
            gin_queue_depth,
            gin_traffic_class,
            gin_strong_signals,
            gin_va_signals,
            gin_custom_stride,
            gin_type,
            cft,
            cft_multimem,
            cft_barriers,
            resources,
        } = self;
        let traffic_class =
            gin_traffic_class.map_or_else(|| "the communicator's".to_owned(), |c| c.to_string());
        let fields: [(&str, &dyn std::fmt::Display); 21] = [
            ("lsa_multimem", lsa_multimem),
            ("barriers", barriers),
            ("lsa_barriers", lsa_barriers),
            ("rail_gin_barriers", rail_gin_barriers),
            ("world_gin_barriers", world_gin_barriers),
            ("lsa_ll_a2a blocks", lsa_ll_a2a_blocks),
            ("lsa_ll_a2a slots", lsa_ll_a2a_slots),
            ("gin_contexts", gin_contexts),
            ("gin_signals", gin_signals),
            ("gin_counters", gin_counters),
            ("gin_connection", &self.connection()),
            ("gin_exclusive_contexts", gin_exclusive_contexts),
            ("gin_queue_depth", gin_queue_depth),
            ("gin_traffic_class", &traffic_class),
            ("gin_strong_signals", gin_strong_signals),
            ("gin_va_signals", gin_va_signals),
            ("gin_custom_stride", gin_custom_stride),
            ("gin_type", gin_type),
            ("cft", cft),
            ("cft_multimem", cft_multimem),
            ("cft_barriers", cft_barriers),
        ];
        let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value.to_string()));
        let resources = resources.iter().enumerate();
        fields
            .chain(resources.map(|(i, resource)| (format!("resource {i}"), resource.to_string())))
            .collect()
    }
}
