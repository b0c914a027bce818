//! Compares requirements between ranks, before a collective call that would hang or fail if they
//! differed.

use serde::{Deserialize, Serialize};

use super::DevCommRequirements;
use super::check::check;
use super::facilities::Facilities;
use crate::communicator::Properties;
use crate::error::{DevCommError, Error, Result};

/// A rank's requirements, and why it refuses them if it does, as sent to the other ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankRequest {
    /// Name and value of each requirement.
    pub fields: Vec<(String, String)>,
    /// Why this rank cannot meet the requirements; `None` if it can.
    pub refusal: Option<String>,
}

impl RankRequest {
    /// This rank's request, checked on this rank.
    pub(crate) fn new(
        requirements: &DevCommRequirements,
        properties: &Properties,
        facilities: &Facilities,
    ) -> Self {
        let refusal = check(requirements, properties, facilities).err();
        Self {
            fields: requirements.describe(),
            refusal: refusal.map(|refusal| refusal.to_string()),
        }
    }

    /// The result of this rank's check: without a `World`, ranks cannot exchange requests.
    ///
    /// # Errors
    ///
    /// [`DevCommError::Refused`].
    pub(crate) fn check_local(self, rank: usize) -> Result<()> {
        match self.refusal {
            None => Ok(()),
            Some(why) => Err(DevCommError::Refused { rank, others: 0, why }.into()),
        }
    }

    /// Encodes the request for the other ranks.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self)
            .map_err(|error| Error::invalid(format!("requirements cannot be sent: {error}")))
    }

    /// Decodes what `rank` sent.
    pub(crate) fn from_bytes(rank: usize, bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes).map_err(|error| {
            Error::invalid(format!(
                "rank {rank} sent no requirements of a device communicator ({error}); all ranks \
                 must make collective calls in the same order"
            ))
        })
    }
}

/// Fails if a rank cannot meet the requirements or if two ranks ask for different things. `all` has
/// every rank's request, in rank order; every rank computes the same result from the same requests.
///
/// # Errors
///
/// [`DevCommError::Refused`], [`DevCommError::RequirementsDiffer`].
pub(crate) fn agree(all: &[RankRequest]) -> Result<()> {
    let mut refusals = all
        .iter()
        .enumerate()
        .filter_map(|(rank, request)| request.refusal.as_ref().map(|why| (rank, why)));
    if let Some((rank, why)) = refusals.next() {
        return Err(
            DevCommError::Refused { rank, others: refusals.count(), why: why.clone() }.into()
        );
    }
    let Some(first) = all.first() else { return Ok(()) };
    let differing = all.iter().enumerate().find(|(_, request)| request.fields != first.fields);
    match differing {
        None => Ok(()),
        Some((rank, request)) => {
            let (field, of_first, of_rank) = difference(&first.fields, &request.fields);
            Err(DevCommError::RequirementsDiffer {
                field,
                first: (0, of_first),
                second: (rank, of_rank),
            }
            .into())
        }
    }
}

/// The first field in which two lists differ, with both values.
fn difference(a: &[(String, String)], b: &[(String, String)]) -> (String, String, String) {
    let value = |fields: &[(String, String)], name: &str| {
        let found = fields.iter().find(|field| field.0 == name);
        found.map_or_else(|| "nothing".to_owned(), |field| field.1.clone())
    };
    let names = a.iter().chain(b).map(|field| &field.0);
    names
        .map(|name| (name.clone(), value(a, name), value(b, name)))
        .find(|(_, of_a, of_b)| of_a != of_b)
        .unwrap_or_else(|| {
            ("the order of fields".to_owned(), "one".to_owned(), "another".to_owned())
        })
}

impl DevCommRequirements {
    /// Name and value of each requirement that must be the same on all ranks.
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
