//! Compiled shaders of a device, each made once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use qgemm_hal::HalError;

use crate::families::INTERFACES;
use crate::shader::Shader;
use crate::shared::Shared;

/// What all kernels of an operation are given.
#[derive(Debug)]
pub(crate) struct Interface {
    /// The operation.
    pub name: &'static str,
    /// Number of each binding, and whether kernels write what is bound there.
    pub bindings: &'static [(u32, bool)],
    /// Bytes of the parameters, which travel as immediates.
    pub params_bytes: u32,
}

/// An interface as a device knows it.
pub(crate) struct Layout {
    pub bindings: wgpu::BindGroupLayout,
    pipeline: wgpu::PipelineLayout,
}

/// How a dispatch binds its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Binding {
    /// What is read lies in other buffers than what is written.
    Apart,
    /// Some buffer is both read and written, in different places or by the same invocations. wgpu wants every binding of
    /// such a buffer to be writable, so that here all are.
    OneBuffer,
}

/// A kernel that is ready: its name, for errors and debuggers, and its pipeline.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub name: String,
    interface: &'static Interface,
    shader: Shader,
    apart: wgpu::ComputePipeline,
    /// Made by the first launch that reads and writes one buffer: few do.
    one_buffer: OnceLock<wgpu::ComputePipeline>,
}

impl Compiled {
    /// Compiles `shader` where that has not been done before.
    pub fn new(shared: &Shared, interface: &'static Interface, name: String, shader: Shader) -> Result<Self, HalError> {
        let apart = pipeline(shared, interface, Binding::Apart, &name, shader.clone())?;
        Ok(Self { name, interface, shader, apart, one_buffer: OnceLock::new() })
    }

    /// The pipeline for operands that are bound so.
    pub fn pipeline(&self, shared: &Shared, binding: Binding) -> Result<&wgpu::ComputePipeline, HalError> {
        if binding == Binding::Apart {
            return Ok(&self.apart);
        }
        if let Some(made) = self.one_buffer.get() {
            return Ok(made);
        }
        let made = pipeline(shared, self.interface, binding, &self.name, self.shader.writable())?;
        Ok(self.one_buffer.get_or_init(|| made))
    }
}

/// The layouts of all operations, and the pipelines made so far by their source.
pub(crate) struct Pipelines {
    layouts: Vec<(&'static str, Binding, Layout)>,
    compiled: Mutex<HashMap<String, Arc<Mutex<Option<wgpu::ComputePipeline>>>>>,
}

impl Pipelines {
    pub fn new(device: &wgpu::Device) -> Self {
        let layout = |interface: &&Interface| {
            [Binding::Apart, Binding::OneBuffer].map(|how| (interface.name, how, Layout::new(device, interface, how)))
        };
        let layouts = INTERFACES.iter().flat_map(layout).collect();
        Self { layouts, compiled: Mutex::new(HashMap::new()) }
    }

    /// The layout of one of [`INTERFACES`].
    pub fn layout(&self, interface: &Interface, binding: Binding) -> &Layout {
        let own = self.layouts.iter().find(|(name, how, _)| (*name, *how) == (interface.name, binding));
        &own.unwrap_or_else(|| unreachable!("{} is not among the interfaces", interface.name)).2
    }
}

impl Layout {
    fn new(device: &wgpu::Device, interface: &Interface, how: Binding) -> Self {
        let entry = |&(binding, written): &(u32, bool)| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Storage { read_only: !written && how == Binding::Apart },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        };
        let entries: Vec<_> = interface.bindings.iter().map(entry).collect();
        let label = Some(interface.name);
        let bindings = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label, entries: &entries });
        let pipeline = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label,
            bind_group_layouts: &[Some(&bindings)],
            immediate_size: interface.params_bytes,
        });
        Self { bindings, pipeline }
    }
}

/// The pipeline of `shader`, compiled where it has not been before. `name` is for errors and debuggers.
pub(crate) fn pipeline(
    shared: &Shared,
    interface: &Interface,
    binding: Binding,
    name: &str,
    shader: Shader,
) -> Result<wgpu::ComputePipeline, HalError> {
    let Shader { source, prelude } = shader;
    let place = {
        let mut compiled = shared.pipelines.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(compiled.entry(source.clone()).or_default())
    };
    // Whoever wants the same meanwhile waits; others do not.
    let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pipeline) = &*place {
        return Ok(pipeline.clone());
    }
    let _span = tracing::info_span!("compile", kernel = name).entered();
    let made = shared.try_scoped("compiling a kernel", || {
        let description = wgpu::ShaderModuleDescriptor {
            label: Some(name),
            source: wgpu::ShaderSource::Wgsl(source.as_str().into()),
        };
        // SAFETY: the text is our own. Every access to a buffer is within what a dispatch binds, for `Touched::bind` refuses
        // views that are shorter than the extents of all that is accessed, from which the strides come, too. Of `gemm`: rows
        // of W are clamped to the last tile, tokens to the last of X, columns of the column order are compared with
        // `stored_k`, its entries and other columns of X with K, positions in C, bias, scales, residual and D with the counts
        // of rows, features and tokens. X that is read without comparing columns has whole steps of them:
        // `matrix::x_prologue` has it converted otherwise, to as many columns as `WorkspaceLayout::with_x` makes whole steps.
        // A part of K has at least a k-tile; its sums are a matrix of whole tiles of rows, of which there are as many as parts
        // (`gemm/parts.rs`). Of experts: rows and experts that an index names are compared with their counts, the latter with those bound.
        // Of `convert`: rows are compared with their count, columns of X, of D and of the order with theirs, entries of the
        // order with X's; D is written by vectors only where its rows are whole ones (`convert::writes_vectors`).
        // Of `routing`: tokens, slots, chunks and experts are compared with their counts, ids with that of experts; places in the
        // rows are counts of the slots before them. Of `matmul`: rows, columns and places along K are compared with M, N and K.
        // Of `quantize`: rows and columns are compared with their counts, of which planes
        // have whole groups. Of `attention`: sequences, rows, keys, pages and words of masks are compared with their counts,
        // offsets and lengths bounded by what there is; of codes that begin within a word, the next word is read or written only where
        // bytes of it are theirs. Of `kv_append`: the same, and positions compared with the rows of tables. Of `indexer`: queries, keys and pages are compared with their counts, ends bounded by those of keys. Of `norm`: rows and columns are compared with their counts. Workgroup
        // memory is indexed by constants of the tile and by places of invocations. Every loop counts to such a bound in steps
        // of at least 1.
        let module =
            unsafe { shared.device.create_shader_module_trusted(description, wgpu::ShaderRuntimeChecks::unchecked()) };
        shared.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(name),
            layout: Some(&shared.pipelines.layout(interface, binding).pipeline),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                // Our kernels write all of it before they read any.
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        })
    })?;
    let pipeline = made.map_err(|fault| HalError::Compile {
        kernel: name.to_owned(),
        target: format!("{} (WGSL)", shared.id),
        options: prelude.lines().collect::<Vec<_>>().join(" "),
        log: fault.into_message(),
    })?;
    Ok(place.insert(pipeline).clone())
}
