//! NCCL's host ABI: structs and constants, as in `nccl.h` and `nccl_device/host.h` of 2.32.3.

use std::ffi::{c_char, c_int, c_void};
use std::mem::{offset_of, size_of};
use std::ptr::{null, null_mut};

use devcomm_types::nccl::{MultimemHandle, ResourceHandle, Team};

/// The magic number of most versioned structs. NCCL: `NCCL_API_MAGIC`.
pub const API_MAGIC: u32 = 0xcafe_beef;
/// The version of NCCL that these structs are from. NCCL: `NCCL_VERSION_CODE`.
pub const ABI_VERSION: u32 = 23203;
/// The value of a number that is not set. NCCL: `NCCL_CONFIG_UNDEF_INT`.
pub const UNDEF_INT: c_int = c_int::MIN;
/// NCCL: `ncclSuccess`.
pub const SUCCESS: c_int = 0;
/// The call continues in the background. NCCL: `ncclInProgress`.
pub const IN_PROGRESS: c_int = 7;

/// NCCL: `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawUniqueId(pub [u8; 128]);

/// Declares structs that begin with size, magic and version, with NCCL's initial values.
macro_rules! versioned {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident = $initializer:literal, magic $magic:expr, {
            $( $field:ident: $type:ty = $value:expr, )*
        }
    )*) => { $(
        $(#[doc = $doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $name {
            pub size: usize,
            pub magic: u32,
            pub version: u32,
            $( pub $field: $type, )*
        }

        impl $name {
            #[doc = concat!("NCCL: `", $initializer, "`.")]
            pub const fn new() -> Self {
                Self {
                    size: size_of::<Self>(),
                    magic: $magic,
                    version: ABI_VERSION,
                    $( $field: $value, )*
                }
            }
        }
    )* };
}

versioned! {
    /// NCCL: `ncclCommProperties_t`. NCCL's bools are bytes here, so that no value is invalid.
    CommProperties = "NCCL_COMM_PROPERTIES_INITIALIZER", magic API_MAGIC, {
        rank: c_int = 0,
        n_ranks: c_int = 0,
        cuda_dev: c_int = 0,
        nvml_dev: c_int = 0,
        device_api_support: u8 = 0,
        multimem_support: u8 = 0,
        gin_type: c_int = 0,
        n_lsa_teams: c_int = 0,
        host_rma_support: u8 = 0,
        railed_gin_type: c_int = 0,
        comm_hash: u64 = 0,
        gin_min_stride: c_int = 0,
        gin_connection_type: c_int = 0,
        gin_support: [u8; 64] = [0; 64],
        dev_comm_runtime_version_size: usize = 0,
        cft_support: u8 = 0,
        cft_multicast_support: u8 = 0,
        cft_counted_support: u8 = 0,
    }

    /// NCCL: `ncclDevCommRequirements_t`.
    Requirements = "NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER", magic API_MAGIC, {
        resource_requirements_list: *mut ResourceRequirements = null_mut(),
        team_requirements_list: *mut TeamRequirements = null_mut(),
        lsa_multimem: bool = false,
        barrier_count: c_int = 0,
        lsa_barrier_count: c_int = 0,
        rail_gin_barrier_count: c_int = 0,
        lsa_ll_a2a_block_count: c_int = 0,
        lsa_ll_a2a_slot_count: c_int = 0,
        gin_force_enable: bool = false,
        gin_context_count: c_int = 4,
        gin_signal_count: c_int = 0,
        gin_counter_count: c_int = 0,
        gin_connection_type: c_int = 0,
        gin_exclusive_contexts: bool = false,
        gin_queue_depth: c_int = 0,
        gin_traffic_class: c_int = UNDEF_INT,
        world_gin_barrier_count: c_int = 0,
        gin_strong_signals_required: bool = true,
        gin_va_signals_required: bool = true,
        gin_custom_stride: c_int = 1,
        gin_type: c_int = 0,
        use_runtime_version: bool = false,
        cft_caps: c_int = 0,
        cft_barrier_count: c_int = 0,
    }

    /// NCCL: `ncclConfig_t`. Every number is initially [`UNDEF_INT`], which leaves the choice to
    /// NCCL.
    Config = "NCCL_CONFIG_INITIALIZER", magic API_MAGIC, {
        blocking: c_int = UNDEF_INT,
        cga_cluster_size: c_int = UNDEF_INT,
        min_ctas: c_int = UNDEF_INT,
        max_ctas: c_int = UNDEF_INT,
        net_name: *const c_char = null(),
        split_share: c_int = UNDEF_INT,
        traffic_class: c_int = UNDEF_INT,
        comm_name: *const c_char = null(),
        collnet_enable: c_int = UNDEF_INT,
        cta_policy: c_int = UNDEF_INT,
        shrink_share: c_int = UNDEF_INT,
        nvls_ctas: c_int = UNDEF_INT,
        n_channels_per_net_peer: c_int = UNDEF_INT,
        nvlink_centric_sched: c_int = UNDEF_INT,
        graph_usage_mode: c_int = UNDEF_INT,
        num_rma_ctx: c_int = UNDEF_INT,
        max_p2p_peers: c_int = UNDEF_INT,
        graph_stream_ordering: c_int = UNDEF_INT,
        launch_order_implicit: c_int = UNDEF_INT,
        num_rma_sig: c_int = UNDEF_INT,
        rma_eager_init: c_int = UNDEF_INT,
        host_cft_mode: c_int = UNDEF_INT,
        nvls_host_mode: c_int = UNDEF_INT,
    }
}

/// NCCL: `ncclConfigExt_t`, a vendor-specific option.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ConfigExt {
    pub next: *mut ConfigExt,
    pub vendor_id: c_int,
    pub option_id: c_int,
    pub value: ConfigExtValue,
}

/// The value of a vendor-specific option, whose type the vendor defines.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ConfigExtValue {
    pub int: c_int,
    pub text: *const c_char,
    pub raw: *mut c_void,
}

versioned! {
    /// NCCL: `ncclCollConfig_t`.
    CollConfig = "NCCL_COLLCONFIG_INITIALIZER", magic API_MAGIC, {
        ext: *mut ConfigExt = null_mut(),
        min_ctas: c_int = UNDEF_INT,
        max_ctas: c_int = UNDEF_INT,
        nvls_ctas: c_int = UNDEF_INT,
        cga_cluster_size: c_int = UNDEF_INT,
        alg_selection: *const c_char = null(),
        force_alg_selection: c_int = 1,
        cta_policy: c_int = UNDEF_INT,
        user_profiler_tag: u64 = 0,
        launch_completion_event: *mut c_void = null_mut(),
    }

    /// NCCL: `ncclSimInfo_t`.
    SimInfo = "NCCL_SIM_INFO_INITIALIZER", magic 0x7468_5283, {
        estimated_time: f32 = -1.0,
    }

    /// NCCL: `ncclEncryptionConfig_t`.
    EncryptionConfig = "NCCL_ENCRYPTION_CONFIG_INITIALIZER", magic API_MAGIC, {
        mode: c_int = 0,
        psk: *const c_char = null(),
    }
}

/// NCCL: `ncclWaitSignalDesc_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawWaitSignal {
    pub op_count: c_int,
    pub peer: c_int,
    pub signal_index: c_int,
    pub context: c_int,
}

/// NCCL: `ncclDevResourceRequirements_t`, a node of a list.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ResourceRequirements {
    pub next: *mut ResourceRequirements,
    pub buffer_size: usize,
    pub buffer_align: usize,
    pub out_buffer_handle: *mut ResourceHandle,
    pub gin_signal_count: c_int,
    pub gin_counter_count: c_int,
    pub out_gin_signal_start: *mut u32,
    pub out_gin_counter_start: *mut u32,
}

impl ResourceRequirements {
    /// No resources.
    pub const NONE: Self = Self {
        next: null_mut(),
        buffer_size: 0,
        buffer_align: 0,
        out_buffer_handle: null_mut(),
        gin_signal_count: 0,
        gin_counter_count: 0,
        out_gin_signal_start: null_mut(),
        out_gin_counter_start: null_mut(),
    };
}

/// NCCL: `ncclTeamRequirements_t`, a node of a list.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TeamRequirements {
    pub next: *mut TeamRequirements,
    pub team: Team,
    pub multimem: bool,
    pub out_multimem_handle: *mut MultimemHandle,
}

const _: () = {
    assert!(size_of::<Config>() == 120 && size_of::<CollConfig>() == 72);
    assert!(size_of::<ConfigExt>() == 24 && size_of::<SimInfo>() == 24);
    assert!(size_of::<EncryptionConfig>() == 32 && size_of::<RawWaitSignal>() == 16);
    assert!(size_of::<ResourceRequirements>() == 56 && size_of::<TeamRequirements>() == 32);
    assert!(size_of::<RawUniqueId>() == 128 && align_of::<RawUniqueId>() == 1);
    assert!(size_of::<CommProperties>() == 152);
    assert!(offset_of!(CommProperties, multimem_support) == 33);
    assert!(offset_of!(CommProperties, gin_type) == 36);
    assert!(offset_of!(CommProperties, railed_gin_type) == 48);
    assert!(offset_of!(CommProperties, comm_hash) == 56);
    assert!(offset_of!(CommProperties, gin_support) == 72);
    assert!(offset_of!(CommProperties, dev_comm_runtime_version_size) == 136);
    assert!(offset_of!(CommProperties, cft_counted_support) == 146);
    assert!(size_of::<Requirements>() == 120 && align_of::<Requirements>() == 8);
    assert!(offset_of!(Requirements, lsa_multimem) == 32);
    assert!(offset_of!(Requirements, lsa_barrier_count) == 40);
    assert!(offset_of!(Requirements, gin_force_enable) == 56);
    assert!(offset_of!(Requirements, gin_connection_type) == 72);
    assert!(offset_of!(Requirements, gin_traffic_class) == 84);
    assert!(offset_of!(Requirements, gin_va_signals_required) == 93);
    assert!(offset_of!(Requirements, gin_custom_stride) == 96);
    assert!(offset_of!(Requirements, use_runtime_version) == 104);
    assert!(offset_of!(Requirements, cft_barrier_count) == 112);
};

/// NCCL: `ncclComm_t`.
pub type RawComm = *mut c_void;
/// NCCL: `ncclWindow_t`, a device address.
pub type RawWindow = *mut c_void;
/// A CUDA stream: `cudaStream_t` and `CUstream` are one type.
pub type RawStream = *mut c_void;
/// NCCL: `ncclParamHandle_t`.
pub type ParamHandle = *mut c_void;
