//! [`LanguageModel`]: a checkpoint with its tokenizer and chat template.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

use qgemm_api::{Context, HalError, Hyperparameters, Model, Network, PlanOptions, PlanWeights, Ranks, open_model};

use crate::chat_template::{self, ChatTemplate, Message};
use crate::error::Error;
use crate::model_options::ModelOptions;
use crate::tokenizer::Tokenizer;

/// A language model on a device. Cheap to clone; several [`Engine`](crate::Engine)s share its weights.
#[derive(Clone)]
pub struct LanguageModel {
    ctx: Context,
    host: Arc<Model>,
    network: Arc<Network>,
    numbers: Hyperparameters,
    vocabulary: usize,
    weights: Arc<PlanWeights>,
    options: ModelOptions,
    tokenizer: Arc<Tokenizer>,
    chat_template: Option<ChatTemplate>,
    /// The model on the ranks behind the first, and the turn of engines that run on all.
    others: Arc<[LanguageModel]>,
    turn: Arc<Mutex<()>>,
}

impl LanguageModel {
    /// Opens a GGUF file, a safetensors file or a checkpoint folder, and loads its weights onto the device of `ctx`.
    /// A [`Precision`](crate::Precision) states options, too.
    ///
    /// # Errors
    /// [`Error::IsEncoder`], and others that name what the model lacks.
    pub fn open(ctx: &Context, path: impl AsRef<Path>, options: impl Into<ModelOptions>) -> Result<Self, Error> {
        Self::open_ranks(std::slice::from_ref(ctx), path, options)
    }

    /// [`LanguageModel::open`] on several ranks of this process, each with its part of the weights
    /// ([`Context::open_ranks`]). Steps run on all of them, in a thread for each.
    ///
    /// A process that has one rank of several opens its context alone, and runs the same sessions as
    /// the others.
    ///
    /// # Errors
    /// As [`LanguageModel::open`]. An error that names the part of the model which cannot be divided.
    pub fn open_ranks(
        ranks: &[Context],
        path: impl AsRef<Path>,
        options: impl Into<ModelOptions>,
    ) -> Result<Self, Error> {
        let options = options.into();
        let Some((ctx, others)) = ranks.split_first() else {
            return Err(HalError::BadGroup { expected: "a rank or more".into(), got: "none".into() }.into());
        };
        let path = path.as_ref();
        let model = open_model(path)?;
        let network = Network::read(&model, path)?;
        let (Some(numbers), Some(vocabulary)) = (network.hyperparameters(), network.vocabulary()) else {
            return Err(Error::IsEncoder { name: network.architecture().to_owned() });
        };
        let numbers = numbers.clone();
        let tokenizer = Tokenizer::open(&model, path)?;
        let source = chat_template::source(&model, path)?;
        let text = |token: Option<&str>| token.unwrap_or_default().to_owned();
        let (bos, eos) = (text(tokenizer.bos_text()), text(tokenizer.eos_text()));
        let chat_template = source.map(|source| ChatTemplate::new(&source, &bos, &eos)).transpose()?;
        let mut weights = weights_of(ranks, &model, &network, options)?.into_iter().map(Arc::new);
        let Some(own) = weights.next() else { unreachable!("a rank has weights") };
        let first = Self {
            ctx: ctx.clone(),
            host: Arc::new(model),
            network: Arc::new(network),
            numbers,
            vocabulary,
            weights: own,
            options,
            tokenizer: Arc::new(tokenizer),
            chat_template,
            others: Arc::default(),
            turn: Arc::default(),
        };
        let other = |(ctx, weights): (&Context, _)| Self { ctx: ctx.clone(), weights, ..first.clone() };
        Ok(Self { others: others.iter().zip(weights).map(other).collect(), ..first })
    }

    /// The device's context; of the first rank, if there are several.
    pub fn context(&self) -> &Context {
        &self.ctx
    }

    /// Name of the architecture.
    pub fn architecture(&self) -> &'static str {
        self.network.architecture()
    }

    /// Sizes and constants.
    pub fn hyperparameters(&self) -> &Hyperparameters {
        &self.numbers
    }

    /// Size of the vocabulary: rows of the embedding.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Bytes of weights that a step of `tokens` tokens reads, in the
    /// checkpoint's formats.
    ///
    /// An embedding counts if it is tied to the head. Experts count
    /// as often as a router that is balanced chooses them.
    pub fn weight_bytes(&self, tokens: usize) -> f64 {
        self.network.weight_bytes(tokens)
    }

    /// Part of this rank: its heads, and the bytes of its weights. The whole model without ranks.
    ///
    /// # Errors
    /// As [`Network::of_rank`].
    pub fn part(&self) -> Result<Network, Error> {
        match self.ctx.communicator() {
            None => Ok(Network::clone(&self.network)),
            Some(group) => {
                let ranks = Ranks { rank: group.rank(), world: group.world() };
                Ok(self.network.of_rank(ranks, self.options.expert_parallel)?)
            }
        }
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template, if the model has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    /// Tokens of a conversation, ready for the assistant's reply.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`], [`Error::ChatTemplate`], [`Error::Tokenizer`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, Error> {
        let template = self.chat_template.as_ref().ok_or(Error::NoChatTemplate)?;
        self.tokenizer.encode_chat(&template.render(messages, true)?)
    }

    /// The checkpoint.
    pub(crate) fn host(&self) -> &Arc<Model> {
        &self.host
    }

    /// Layers and tensors.
    pub(crate) fn network(&self) -> &Arc<Network> {
        &self.network
    }

    /// The loaded weights.
    pub(crate) fn weights(&self) -> &Arc<PlanWeights> {
        &self.weights
    }

    /// The model on the other ranks.
    pub(crate) fn others(&self) -> &[Self] {
        &self.others
    }

    /// The turn of what runs on all ranks.
    pub(crate) fn turn(&self) -> &Mutex<()> {
        &self.turn
    }

    /// Arithmetic and division.
    pub(crate) fn options(&self) -> ModelOptions {
        self.options
    }
}

impl fmt::Debug for LanguageModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LanguageModel")
            .field("architecture", &self.architecture())
            .field("numbers", &self.numbers)
            .finish_non_exhaustive()
    }
}

/// Loads the weights of all ranks at once.
fn weights_of(
    ranks: &[Context],
    model: &Model,
    network: &Network,
    options: ModelOptions,
) -> Result<Vec<PlanWeights>, Error> {
    if let [ctx] = ranks {
        return Ok(vec![weights(ctx, model, network, options)?]);
    }
    thread::scope(|scope| {
        let load = |ctx| scope.spawn(move || weights(ctx, model, network, options));
        let threads: Vec<_> = ranks.iter().map(load).collect();
        let gone = |rank| HalError::RankGone { rank, why: "its thread panicked".into() };
        let joined = |(rank, thread): (usize, thread::ScopedJoinHandle<'_, _>)| {
            thread.join().unwrap_or_else(|_| Err(gone(rank).into()))
        };
        threads.into_iter().enumerate().map(joined).collect()
    })
}

/// Loads the weights of a step, of which all steps have the same.
fn weights(ctx: &Context, model: &Model, network: &Network, options: ModelOptions) -> Result<PlanWeights, Error> {
    let mut planned = PlanOptions::new(1);
    // Tables of angles reach as far as the model.
    planned.context = network.hyperparameters().map(|numbers| numbers.context);
    options.state(&mut planned);
    let plan = ctx.load_exec_plan(ctx.plan_network(network, &planned)?, model)?;
    plan.check_step()?;
    Ok(plan.load_weights(model)?)
}
